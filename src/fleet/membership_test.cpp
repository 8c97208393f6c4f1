// Lists of workers from outside: a file, Kubernetes.

#include <gtest/gtest.h>

#include "fleet/endpoint_slices.h"
#include "fleet/worker_list.h"

namespace kindred::fleet {
namespace {

TEST(WorkerList, ReadsYamlAndJson) {
  const std::vector<WantedWorker> expected = {{.url = "http://a:1", .role = Role::kPrefill, .dialect = Dialect::kVllm},
                                              {.url = "http://b:1"},
                                              {.url = "http://c:1", .role = Role::kDecode, .draining = true}};
  for (const char* text :
       {"workers:\n- {url: http://a:1, role: prefill, dialect: vllm}\n- url: http://b:1\n"
        "- {url: http://c:1, role: decode, drain: true}\n",
        R"([{"url":"http://a:1","role":"prefill","dialect":"vllm"},{"url":"http://b:1","role":"both"},
                               {"url":"http://c:1","role":"decode","drain":true}])"}) {
    const auto got = parse_worker_list(text, 10);
    ASSERT_TRUE(got.ok()) << got.error().message;
    EXPECT_EQ(*got, expected);
  }
  EXPECT_TRUE(parse_worker_list("[]", 10)->empty());
}

TEST(WorkerList, SaysAllThatIsWrongByLineAndField) {
  const auto got = parse_worker_list(
      "- {url: http://a:1, role: cook}\n- {role: decode}\n- {url: http://a:1}\n- {url: http://b:1, colour: red}\n"
      "- {url: http://c:1, dialect: tgi, drain: maybe}\n",
      10);
  ASSERT_FALSE(got.ok());
  for (const char* says :
       {"line 1: role: got 'cook'", "line 2: url: is required", "line 3: url: 'http://a:1' is listed twice",
        "line 4: colour: is not a field", "line 5: dialect: got 'tgi'", "line 5: drain: got 'maybe'"}) {
    EXPECT_NE(got.error().message.find(says), std::string::npos) << says << " in " << got.error().message;
  }
}

TEST(WorkerList, RefusesWhatIsNoList) {
  for (const char* text : {"", "a: b", "workers: 7", "workers: []\nother: 1", "[1]", "- [", "{{", "- {url: [a]}"}) {
    EXPECT_FALSE(parse_worker_list(text, 10).ok()) << text;
  }
  EXPECT_EQ(parse_worker_list("[{url: http://a:1},{url: http://b:1}]", 1).error().code, ErrorCode::kTooLarge);
  EXPECT_EQ(parse_worker_list(std::string(kMaxWorkerListBytes + 1, ' '), 1).error().code, ErrorCode::kTooLarge);
}

constexpr const char* kList = R"({"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1",
  "metadata":{"resourceVersion":"100"},"items":[
  {"metadata":{"name":"vllm-abc","labels":{"kubernetes.io/service-name":"vllm","kindred/role":"decode"}},
   "addressType":"IPv4","ports":[{"name":"metrics","port":9090,"protocol":"TCP"},{"name":"http","port":8000}],
   "endpoints":[{"addresses":["10.0.0.2"],"conditions":{"ready":true,"serving":true,"terminating":false}},
                {"addresses":["10.0.0.1"],"conditions":{}},
                {"addresses":["10.0.0.3"],"conditions":{"ready":false}},
                {"addresses":["10.0.0.4"],"conditions":{"ready":false,"serving":true,"terminating":true}}]},
  {"metadata":{"name":"vllm-v6"},"addressType":"IPv6","ports":[{"name":"http","port":8000}],
   "endpoints":[{"addresses":["fd00::1"]}]}]})";

EndpointSlices slices_of(const char* service = "ai/vllm:http") {
  auto parsed = parse_kubernetes_service(service);
  EXPECT_TRUE(parsed.ok());
  return EndpointSlices(*std::move(parsed));
}

std::string urls(const EndpointSlices& slices) {
  std::string out;
  for (const WantedWorker& worker : slices.workers()) {
    out += worker.url + (worker.draining ? " draining" : "") + " " + std::string(to_string(worker.role)) + "\n";
  }
  return out;
}

TEST(KubernetesSlices, AListGivesTheReadyAndTheDraining) {
  EndpointSlices slices = slices_of();
  ASSERT_TRUE(slices.list(kList).ok());
  EXPECT_EQ(slices.version(), "100");
  EXPECT_EQ(urls(slices),
            "http://10.0.0.1:8000 decode\nhttp://10.0.0.2:8000 decode\nhttp://10.0.0.4:8000 draining decode\n"
            "http://[fd00::1]:8000 both\n");
  EndpointSlices fixed = slices_of("ai/vllm:9000=prefill");
  ASSERT_TRUE(fixed.list(kList).ok());
  EXPECT_TRUE(urls(fixed).starts_with("http://10.0.0.1:9000 prefill\n"));
  EndpointSlices first = slices_of("ai/vllm");
  ASSERT_TRUE(first.list(kList).ok());
  EXPECT_TRUE(urls(first).starts_with("http://10.0.0.1:9090 decode\n"));
}

TEST(KubernetesSlices, EventsChangeOneSliceEach) {
  EndpointSlices slices = slices_of("ai/vllm=decode");
  ASSERT_TRUE(slices.list(R"({"metadata":{"resourceVersion":"1"},"items":null})").ok());
  EXPECT_EQ(urls(slices), "");
  const auto slice = [](const char* type, const char* name, const char* version, const char* address) {
    return std::string(R"({"type":")") + type + R"(","object":{"metadata":{"name":")" + name +
           R"(","resourceVersion":")" + version +
           R"("},"addressType":"IPv4","ports":[{"port":80}],"endpoints":[{"addresses":[")" + address + R"("]}]}})";
  };
  ASSERT_TRUE(slices.event(slice("ADDED", "a", "2", "10.0.0.1")).ok());
  ASSERT_TRUE(slices.event(slice("ADDED", "b", "3", "10.0.0.1")).ok());  // in two slices for a while
  EXPECT_EQ(urls(slices), "http://10.0.0.1:80 decode\n");
  ASSERT_TRUE(slices.event(slice("MODIFIED", "a", "4", "10.0.0.9")).ok());
  ASSERT_TRUE(slices.event(slice("DELETED", "b", "5", "10.0.0.1")).ok());
  EXPECT_EQ(urls(slices), "http://10.0.0.9:80 decode\n");
  ASSERT_TRUE(slices.event(R"({"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"77"}}})").ok());
  EXPECT_EQ(slices.version(), "77");
}

TEST(KubernetesSlices, AskForTheListAgainWhenTheServerForgot) {
  EndpointSlices slices = slices_of();
  ASSERT_TRUE(slices.list(kList).ok());
  const Status gone = slices.event(
      R"({"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old resource version"}})");
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.error().code, ErrorCode::kUnavailable);
  EXPECT_FALSE(urls(slices).empty());  // what was known stays until the new list
  for (const char* bad : {"", "{}", R"({"type":"ADDED"})", R"({"type":"ADDED","object":{"metadata":{}}})"}) {
    EXPECT_EQ(slices.event(bad).error().code, ErrorCode::kCorrupt) << bad;
  }
  for (const char* bad : {"", "{}", "[]", R"({"metadata":{"resourceVersion":"1"},"items":7})",
                          R"({"metadata":{"resourceVersion":"1"},"items":[{}]})"}) {
    EXPECT_FALSE(slices.list(bad).ok()) << bad;
  }
  EXPECT_EQ(slices.version(), "100");
}

TEST(KubernetesSlices, NamesAreCheckedBeforeTheyAreSent) {
  const auto good = parse_kubernetes_service("ai/vllm-decode:http=decode");
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good->list_target(),
            "/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices?"
            "labelSelector=kubernetes.io%2Fservice-name%3Dvllm-decode");
  EXPECT_TRUE(
      good->watch_target("5", 300).ends_with("&watch=1&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion=5"));
  for (const char* bad : {"", "a", "/b", "a/", "a/b:", "a/b=cook", "a/b?x=1", "a/../b", "A/b", "a/b c"}) {
    EXPECT_FALSE(parse_kubernetes_service(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace kindred::fleet
