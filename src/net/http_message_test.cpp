#include "net/http_message.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "net/ascii.h"

namespace kindred::net {
namespace {

Result<RequestHead> request(std::string_view text) { return parse_request_head(text, HeadLimits{}); }
Result<ResponseHead> response(std::string_view text) { return parse_response_head(text, HeadLimits{}); }

TEST(RequestHead, ParsesWhatIsRight) {
  const auto head = request(
      "POST /v1/chat/completions?a=1&b=x%20y&c HTTP/1.1\r\nHost: h:80\r\nX-Empty:\r\nx-Value: \t two words\t \r\n\r\n");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->method, "POST");
  EXPECT_EQ(head->path(), "/v1/chat/completions");
  EXPECT_EQ(head->query(), "a=1&b=x%20y&c");
  EXPECT_EQ(head->query_value("b"), "x y");
  EXPECT_EQ(head->query_value("c"), "");
  EXPECT_EQ(head->query_value("d"), std::nullopt);
  EXPECT_EQ(*head->headers.find("X-VALUE"), "two words");
  EXPECT_EQ(*head->headers.find("x-empty"), "");
  EXPECT_EQ(head->headers.find("none"), nullptr);
  EXPECT_EQ(head->minor_version, 1);
  EXPECT_TRUE(keep_alive(*head));
  EXPECT_TRUE(request("GET / HTTP/1.0\r\n\r\n").ok());
  EXPECT_TRUE(request("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n").ok());
  EXPECT_TRUE(request("GET / HTTP/1.1\r\nHost: \r\n\r\n").ok());
  EXPECT_TRUE(request("GET /\xc3\xa9 HTTP/1.1\r\nHost: h\r\nX: \xff\r\n\r\n").ok());
}

TEST(RequestHead, TurnsAbsoluteFormIntoOriginForm) {
  const auto head = request("GET http://real:81/p?q=1 HTTP/1.1\r\nHost: other\r\n\r\n");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->target, "/p?q=1");
  EXPECT_EQ(*head->headers.find("Host"), "real:81");
  EXPECT_EQ(request("GET http://h HTTP/1.1\r\nHost: h\r\n\r\n")->target, "/");
  EXPECT_EQ(request("GET http://h?x HTTP/1.1\r\nHost: h\r\n\r\n")->target, "/?x");
  for (const char* authority : {"a,b", "a\tb", "u@h", ""}) {
    EXPECT_FALSE(request("GET http://" + std::string(authority) + "/ HTTP/1.1\r\nHost: h\r\n\r\n").ok()) << authority;
  }
}

TEST(RequestHead, RefusesWhatIsNot) {
  const std::string host = "Host: h\r\n";
  for (const std::string& text :
       std::vector<std::string>{"",
                                "\r\n",
                                "GET\r\n\r\n",
                                "GET /\r\n" + host + "\r\n",
                                "GET  HTTP/1.1\r\n" + host + "\r\n",
                                "GET / /x HTTP/1.1\r\n" + host + "\r\n",
                                " GET / HTTP/1.1\r\n" + host + "\r\n",
                                "G(T / HTTP/1.1\r\n" + host + "\r\n",
                                "GET x HTTP/1.1\r\n" + host + "\r\n",
                                "GET /\t HTTP/1.1\r\n" + host + "\r\n",
                                "GET /#f HTTP/1.1\r\n" + host + "\r\n",
                                "GET http:///x HTTP/1.1\r\n" + host + "\r\n",
                                "GET http://u@h/ HTTP/1.1\r\n" + host + "\r\n",
                                "GET / HTTP/1.1\n" + host + "\r\n",
                                "GET / HTTP/1.1\r\nHost: h\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "\n",
                                "GET / HTTP/1.1\r\n" + host + "X: a\r\n b\r\n\r\n",
                                "GET / HTTP/1.1\r\n " + host + "\r\n",
                                "GET / HTTP/1.1\r\nHost : h\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + ": x\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "name\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "na me: x\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "X: a\rb\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "X: \x01\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + std::string("X: a\0b\r\n\r\n", 10),
                                "GET / HTTP/1.1\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + host + "\r\n",
                                "GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
                                "GET / HTTP/1.1\r\n" + host + "\r\nmore",
                                "GET / http/1.1\r\n" + host + "\r\n",
                                "GET / HTTP/1.1x\r\n" + host + "\r\n"}) {
    const auto head = request(text);
    ASSERT_FALSE(head.ok()) << text;
    EXPECT_EQ(head.error().code, ErrorCode::kInvalid) << text;
    EXPECT_EQ(head.error().field, "") << text;
  }
  EXPECT_EQ(request("GET / HTTP/2.0\r\nHost: h\r\n\r\n").error().field, kFieldVersion);
  EXPECT_EQ(request("GET / HTTP/1.2\r\nHost: h\r\n\r\n").error().field, kFieldVersion);
  EXPECT_EQ(request("CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n").error().field, kFieldMethod);
}

TEST(RequestHead, KeepsItsLimits) {
  HeadLimits limits;
  limits.header_count = 2;
  EXPECT_TRUE(parse_request_head("GET / HTTP/1.1\r\nHost: h\r\na: 1\r\n\r\n", limits).ok());
  EXPECT_EQ(parse_request_head("GET / HTTP/1.1\r\nHost: h\r\na: 1\r\nb: 1\r\n\r\n", limits).error().code,
            ErrorCode::kTooLarge);
  limits.head_bytes = 20;
  EXPECT_EQ(parse_request_head("GET / HTTP/1.1\r\nHost: h\r\n\r\n", limits).error().code, ErrorCode::kTooLarge);
}

TEST(ResponseHead, ParsesAndRefuses) {
  const auto head = response("HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\n\r\n");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->status, 429);
  EXPECT_EQ(head->reason, "Too Many");
  EXPECT_TRUE(response("HTTP/1.1 200\r\n\r\n").ok());
  EXPECT_TRUE(response("HTTP/1.0 200 \r\n\r\n").ok());
  for (const char* text : {"HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1 2000 OK\r\n\r\n", "HTTP/1.1 099 No\r\n\r\n",
                           "HTTP/1.1 600 No\r\n\r\n", "HTTP/1.1  200 OK\r\n\r\n", "HTTP/2.0 200 OK\r\n\r\n",
                           "HTTP/1.1 200 OK\n\r\n", "HTTP/1.1 200 \x01\r\n\r\n", "ICY 200 OK\r\n\r\n", "\r\n"}) {
    EXPECT_FALSE(response(text).ok()) << text;
  }
}

TEST(HeadScanner, FindsTheEndAtEverySplit) {
  const std::string wire = "GET / HTTP/1.1\r\nHost: h\r\n\r\nbody\n\r\n\r\n";
  for (size_t a = 0; a <= wire.size(); ++a) {
    for (size_t b = a; b <= wire.size(); ++b) {
      HeadScanner scanner;
      HeadScanner::State state = HeadScanner::State::kMore;
      for (const size_t size : {a, b, wire.size()}) {
        if (state == HeadScanner::State::kMore) state = scanner.scan(std::string_view(wire).substr(0, size));
      }
      ASSERT_EQ(state, HeadScanner::State::kComplete);
      ASSERT_EQ(scanner.size(), 27U);
    }
  }
  HeadScanner bare;
  EXPECT_EQ(bare.scan("GET / HTTP/1.1\n"), HeadScanner::State::kBareLf);
  HeadScanner first;
  EXPECT_EQ(first.scan("\n"), HeadScanner::State::kBareLf);
}

Result<BodyFraming> framing(const std::string& headers, const std::string& version = "1.1") {
  const auto head = request("POST / HTTP/" + version + "\r\nHost: h\r\n" + headers + "\r\n");
  return head.ok() ? request_framing(*head) : Result<BodyFraming>(head.error());
}

TEST(Framing, OfRequests) {
  EXPECT_EQ(framing("")->kind, BodyFraming::Kind::kNone);
  EXPECT_EQ(framing("Content-Length: 12\r\n")->length_bytes, 12U);
  EXPECT_EQ(framing("transfer-encoding: Chunked\r\n")->kind, BodyFraming::Kind::kChunked);
  for (const char* headers :
       {"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 1\r\nContent-Length: 2\r\n",
        "Content-Length: 1\r\nContent-Length: 1\r\n", "Content-Length: 1, 1\r\n", "Content-Length: +1\r\n",
        "Content-Length: -1\r\n", "Content-Length: 0x1\r\n", "Content-Length: 1 2\r\n", "Content-Length:\r\n",
        "Content-Length: 99999999999999999999999\r\n", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n", "Transfer-Encoding: identity\r\n", "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: \"chunked\"\r\n", "Transfer-Encoding: chunked;q=1\r\n", "Transfer-Encoding:\r\n"}) {
    EXPECT_FALSE(framing(headers).ok()) << headers;
  }
  EXPECT_EQ(framing("Transfer-Encoding: gzip, chunked\r\n").error().field, kFieldTransferEncoding);
  EXPECT_EQ(framing("Transfer-Encoding: gzip\r\n").error().field, "");
  EXPECT_FALSE(framing("Transfer-Encoding: chunked\r\n", "1.0").ok());
}

TEST(Framing, OfResponses) {
  const auto kind = [](const std::string& status, const std::string& headers, std::string_view method = "GET") {
    return response_framing(*response("HTTP/1.1 " + status + " X\r\n" + headers + "\r\n"), method)->kind;
  };
  EXPECT_EQ(kind("200", ""), BodyFraming::Kind::kUntilClose);
  EXPECT_EQ(kind("200", "Content-Length: 0\r\n"), BodyFraming::Kind::kLength);
  EXPECT_EQ(kind("200", "Content-Length: 9\r\n", "HEAD"), BodyFraming::Kind::kNone);
  EXPECT_EQ(kind("204", ""), BodyFraming::Kind::kNone);
  EXPECT_EQ(kind("304", "Content-Length: 9\r\n"), BodyFraming::Kind::kNone);
  EXPECT_EQ(kind("500", "Transfer-Encoding: chunked\r\n"), BodyFraming::Kind::kChunked);
}

TEST(KeepAlive, FollowsVersionAndHeader) {
  const auto stays = [](const std::string& version, const std::string& headers) {
    return keep_alive(*request("GET / HTTP/" + version + "\r\nHost: h\r\n" + headers + "\r\n"));
  };
  EXPECT_TRUE(stays("1.1", ""));
  EXPECT_FALSE(stays("1.1", "Connection: x, Close\r\n"));
  EXPECT_FALSE(stays("1.0", ""));
  EXPECT_TRUE(stays("1.0", "connection: Keep-Alive\r\n"));
}

TEST(HopByHop, GoesAndTheRestStays) {
  Headers headers;
  for (const char* name : {"Connection", "Keep-Alive", "TE", "Transfer-Encoding", "Upgrade", "X-Mine", "X-Kept"}) {
    headers.add(name, std::string_view(name) == "Connection" ? "close, x-mine" : "1");
  }
  for (const Header& header : headers) EXPECT_EQ(is_hop_by_hop(headers, header.name), header.name != "X-Kept");
}

TEST(HeaderLine, CannotBeBrokenOutOf) {
  std::string out;
  append_header_line(out, "X", "a\r\nEvil: 1");
  EXPECT_EQ(out, "X: a  Evil: 1\r\n");
}

TEST(HeaderLine, SeesEveryControlCharacterAtEveryPlace) {
  // Values are judged eight bytes at a time, the rest one by one.
  for (size_t length = 1; length <= 20; ++length) {
    for (size_t at = 0; at < length; ++at) {
      for (int byte = 0; byte < 256; ++byte) {
        std::string value(length, 'v');
        value[at] = static_cast<char>(byte);
        const bool control = byte < 0x20 || byte == 0x7f;
        EXPECT_EQ(has_control(value), control) << byte << " at " << at << " of " << length;
        // A line end would only end the line, and white space at the ends is trimmed.
        if (byte == '\r' || byte == '\n') continue;
        EXPECT_EQ(request("GET / HTTP/1.1\r\nHost: h\r\nX: " + value + "\r\n\r\n").ok(), !control || byte == '\t');
        std::string out;
        append_header_line(out, "Name", value);
        std::string wanted = value;
        if (control && byte != '\t') wanted[at] = ' ';
        EXPECT_EQ(out, "Name: " + wanted + "\r\n");
      }
    }
  }
}

TEST(HeaderNames, CompareWithoutCaseAndOnlyThat) {
  EXPECT_TRUE(equals_ignore_case("Content-Length", "cONTENT-lENGTH"));
  EXPECT_TRUE(equals_ignore_case("Transfer-Encoding", "Transfer-encodinG"));
  EXPECT_TRUE(equals_ignore_case("", ""));
  EXPECT_FALSE(equals_ignore_case("Content-Length", "Content-Lengti"));
  EXPECT_FALSE(equals_ignore_case("Content-Length", "Xontent-Length"));
  EXPECT_FALSE(equals_ignore_case("ab", "abc"));
  // They differ in the bit that makes the case of letters, and are none.
  EXPECT_FALSE(equals_ignore_case("@", "`"));
  EXPECT_FALSE(equals_ignore_case("x[", "x{"));
}

TEST(Endpoint, ParsesAndRefuses) {
  EXPECT_EQ(*parse_endpoint("http://127.0.0.1:80"), (Endpoint{"127.0.0.1", 80}));
  EXPECT_EQ(*parse_endpoint("worker-1:8001"), (Endpoint{"worker-1", 8001}));
  EXPECT_EQ(*parse_endpoint("http://h:1/"), (Endpoint{"h", 1}));
  EXPECT_EQ(*parse_endpoint("[::1]:80"), (Endpoint{"::1", 80}));
  EXPECT_EQ(*parse_endpoint("https://h:443"), (Endpoint{"h", 443, true}));
  EXPECT_EQ((Endpoint{"h", 443, true}).url(), "https://h:443");
  EXPECT_EQ((Endpoint{"::1", 80}).url(), "http://[::1]:80");
  for (const char* url : {"", "h", "h:", "h:0", "h:65536", "h:1x", ":1", "https://h", "::1:80", "h/p:1", "u@h:1",
                          "http://h:1/path", "h :1"}) {
    EXPECT_FALSE(parse_endpoint(url).ok()) << url;
  }
}

}  // namespace
}  // namespace kindred::net
