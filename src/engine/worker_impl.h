// The inside of Worker, shared by worker.cpp (service, small endpoints), worker_generate.cpp (plain
// requests and prefill legs), worker_decode.cpp (decode legs) and worker_experts.cpp (expert ranks).
//
// Thread-safety: confined to the io thread.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/rng.h"
#include "engine/chat_template.h"
#include "engine/handoff.h"
#include "engine/lease_store.h"
#include "engine/openai_error.h"
#include "engine/openai_render.h"
#include "engine/openai_request.h"
#include "engine/worker.h"
#include "engine/worker_job.h"
#include "net/http_client.h"
#include "net/http_server.h"

namespace kindred::engine {

// One request and its response.
struct Exchange {
  net::Request& request;
  net::ResponseWriter& writer;
  MonotonicTime arrived;
  std::string request_id;  // the client's X-Request-Id, or one of ours
  int status = 0;          // what was sent; kClientGone if nobody was there to take it

  static constexpr int kClientGone = 499;
};

// A request that is ready to be run.
struct Generation {
  GenerationRequest request;
  std::vector<Token> prompt;
  uint32_t max_tokens = 0;
  ResponseMeta meta;
};

struct WorkerMetrics {
  WorkerMetrics(Registry& registry, const std::string& model);
  Histogram &first_token, &between_tokens, &whole_request, &kv_pull;
  Gauge &leases, &lease_bytes;
};

// Renders the events of one job and keeps what the end of the response needs.
class EventSink {
 public:
  EventSink(ResponseRenderer& renderer, WorkerMetrics& metrics, const Clock& clock, MonotonicTime arrived,
            bool has_first_token);

  // Appends to `out` what the client can have. After an error nothing more is taken.
  void take(Event& event, std::string& out);

  std::optional<PrefillDone> prefill;
  std::optional<Finished> finished;
  std::optional<Error> error;

 private:
  void observe(uint32_t choice);

  ResponseRenderer& renderer_;
  WorkerMetrics& metrics_;
  const Clock& clock_;
  MonotonicTime arrived_;
  bool has_first_token_;
  std::map<uint32_t, MonotonicTime> last_token_;  // per choice
};

struct Worker::Impl {
  Impl(net::asio::any_io_executor executor, WorkerOptions options, const Clock& clock, Registry& metrics);

  // What there is once the model is loaded.
  struct Backend {
    const Model& model;
    Engine& engine;
    WorkerMetrics metrics;
    ChatTemplate chat_template;
    TokenLimits limits;
    size_t longest_piece_bytes;  // of any token
  };

  using Method = net::Task<void> (Impl::*)(Exchange&);
  struct Route {
    std::string_view method, path;  // "{id}" stands for one segment
    Method run;
  };
  static std::span<const Route> routes();

  net::Task<void> handle(net::Request& request, net::ResponseWriter& writer);
  net::Task<void> dispatch(Exchange& x, std::string_view path);
  net::Task<void> send(Exchange& x, int status, std::string_view type, std::string_view body);
  net::Task<void> send_error(Exchange& x, const ApiError& error);
  net::Headers headers(const Exchange& x, std::string_view type) const;
  RequestLimits limits() const;

  // Small endpoints.
  net::Task<void> health(Exchange& x);
  net::Task<void> metrics_page(Exchange& x);
  net::Task<void> models(Exchange& x);
  net::Task<void> version(Exchange& x);
  net::Task<void> tokenize(Exchange& x);
  net::Task<void> detokenize(Exchange& x);
  net::Task<void> reset_prefix_cache(Exchange& x);
  net::Task<void> kv_get(Exchange& x);
  net::Task<void> kv_renew(Exchange& x);
  net::Task<void> kv_release(Exchange& x);
  static net::Task<void> expire_leases(std::weak_ptr<Impl> weak, std::shared_ptr<net::asio::steady_timer> timer);
  void show_leases();
  // Expert ranks (worker_experts.cpp).
  net::Task<void> experts_get(Exchange& x);
  net::Task<void> placement_post(Exchange& x);
  net::Task<void> placement_delete(Exchange& x);
  void show_experts();
  void count_request(std::string_view path, int status);

  // Generation.
  net::Task<void> chat(Exchange& x);
  net::Task<void> completions(Exchange& x);
  net::Task<void> generate(Exchange& x, Api api);
  net::Task<void> run_plain(Exchange& x, Generation generation);
  net::Task<void> run_prefill(Exchange& x, Generation generation);
  net::Task<void> run_decode(Exchange& x, Api api);

  std::vector<Token> with_bos(std::vector<Token> tokens) const;
  Status check_length(size_t text_bytes, std::string_view field) const;
  Result<std::vector<Token>> chat_tokens(std::span<const ChatMessage> messages, bool add_generation_prompt) const;
  Result<std::vector<Token>> text_tokens(std::string_view text) const;
  Result<Generation> prepare(Api api, std::string_view body);
  Job make_job(const Generation& generation, Job::Kind kind);
  ResponseRenderer make_renderer(const Generation& generation) const;
  // Runs the job to its end and writes its response. `tail` holds what the job's own events do not say;
  // `error_of` maps the engine's errors while nothing has been sent.
  net::Task<void> respond(Exchange& x, Job job, ResponseRenderer& renderer, EventSink& sink, ResponseTail tail,
                          ApiError (*error_of)(const Error&));
  Result<PrefillReply> prefill_reply(const Generation& generation, ResponseRenderer& renderer, PrefillDone& done,
                                     std::string first);

  // Decode legs.
  Result<Handoff> read_handoff(const Exchange& x, Api api, Generation& generation);
  net::Task<Result<std::shared_ptr<const Bytes>>> pull_kv(const Handoff& handoff, net::CancelToken cancel);

  net::asio::any_io_executor executor;
  WorkerOptions options;
  const Clock& clock;
  Registry& registry;
  Logger log{"worker"};
  LeaseStore leases;
  net::HttpClient client;
  net::HttpServer server;
  std::optional<Backend> backend;
  bool draining = false;
  Rng random;  // for ids and seeds
  std::shared_ptr<net::asio::steady_timer> lease_timer;
};

}  // namespace kindred::engine
