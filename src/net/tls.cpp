#include "net/tls.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <boost/asio/error.hpp>
#include <cerrno>
#include <climits>
#include <cstring>

namespace kindred::net {
namespace {

namespace error = boost::asio::error;

// The largest payload of a record. Smaller pieces are joined up to it, or each would cost a record of its own.
constexpr size_t kRecordBytes = 16 * 1024;
constexpr std::array<unsigned char, 9> kAlpn = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

// The oldest error of OpenSSL's queue, which it empties.
std::string last_reason() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "unknown cause" : reason;
}

// A socket BIO that sends without SIGPIPE, which OpenSSL's own raises when a peer is gone.
int bio_fd(BIO* bio) { return *static_cast<const int*>(BIO_get_data(bio)); }

int bio_write(BIO* bio, const char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const ssize_t sent = ::send(bio_fd(bio), bytes, static_cast<size_t>(count), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int bio_read(BIO* bio, char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const ssize_t got = ::recv(bio_fd(bio), bytes, static_cast<size_t>(count), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

long bio_ctrl(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

int no_passphrase(char*, int, int, void*) { return 0; }  // OpenSSL would ask the terminal

int choose_http11(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* offered,
                  unsigned int offered_size, void*) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_size, kAlpn.data(), kAlpn.size(), offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

}  // namespace

class TlsContext {
 public:
  explicit TlsContext(bool server)
      : ctx_(SSL_CTX_new(server ? TLS_server_method() : TLS_client_method())),
        bio_(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kindred socket")) {
    KINDRED_CHECK(ctx_ != nullptr && bio_ != nullptr);
    BIO_meth_set_write(bio_.get(), bio_write);
    BIO_meth_set_read(bio_.get(), bio_read);
    BIO_meth_set_ctrl(bio_.get(), bio_ctrl);
    SSL_CTX_set_min_proto_version(ctx_.get(), TLS1_2_VERSION);
    SSL_CTX_set_options(ctx_.get(), SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_mode(ctx_.get(),
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_default_passwd_cb(ctx_.get(), no_passphrase);
    if (server) SSL_CTX_set_alpn_select_cb(ctx_.get(), choose_http11, nullptr);
    else SSL_CTX_set_alpn_protos(ctx_.get(), kAlpn.data(), kAlpn.size());
  }

  SSL_CTX* get() const { return ctx_.get(); }
  const BIO_METHOD* bio() const { return bio_.get(); }

 private:
  struct Free {
    void operator()(SSL_CTX* ctx) const { SSL_CTX_free(ctx); }
    void operator()(BIO_METHOD* method) const { BIO_meth_free(method); }
  };
  std::unique_ptr<SSL_CTX, Free> ctx_;
  std::unique_ptr<BIO_METHOD, Free> bio_;
};

namespace {

kindred::Error unusable_file(std::string_view option, const std::string& file) {
  return invalid(fmt::format("{}: {}: {}", option, file, last_reason()), std::string(option));
}

Status use_certificate(const TlsContext& context, const std::string& certificate, const std::string& key,
                       std::string_view certificate_option, std::string_view key_option) {
  SSL_CTX* ctx = context.get();
  if (SSL_CTX_use_certificate_chain_file(ctx, certificate.c_str()) != 1) {
    return unusable_file(certificate_option, certificate);
  }
  const bool fits =
      SSL_CTX_use_PrivateKey_file(ctx, key.c_str(), SSL_FILETYPE_PEM) == 1 && SSL_CTX_check_private_key(ctx) == 1;
  if (!fits) return unusable_file(key_option, key);
  return {};
}

Result<std::shared_ptr<const TlsContext>> server_context(const TlsServerFiles& files) {
  const auto context = std::make_shared<TlsContext>(/*server=*/true);
  SSL_CTX* ctx = context->get();
  ERR_clear_error();
  if (Status own = use_certificate(*context, files.certificate, files.key, "tls_cert", "tls_key"); !own) {
    return std::move(own).error();
  }
  if (!files.client_ca.empty()) {
    if (SSL_CTX_load_verify_file(ctx, files.client_ca.c_str()) != 1) {
      return unusable_file("tls_client_ca", files.client_ca);
    }
    if (STACK_OF(X509_NAME)* names = SSL_load_client_CA_file(files.client_ca.c_str())) {
      SSL_CTX_set_client_CA_list(ctx, names);
    }
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    // Without one, OpenSSL refuses to resume sessions of clients that were verified.
    constexpr std::string_view kSessions = "kindred";
    SSL_CTX_set_session_id_context(ctx, reinterpret_cast<const unsigned char*>(kSessions.data()), kSessions.size());
  }
  return std::shared_ptr<const TlsContext>(context);
}

}  // namespace

Result<std::shared_ptr<TlsServer>> TlsServer::load(TlsServerFiles files) {
  std::shared_ptr<TlsServer> server(new TlsServer(std::move(files)));  // the constructor is private
  if (Status read = server->reload(); !read) return std::move(read).error();
  return server;
}

std::shared_ptr<const TlsContext> TlsServer::current() const {
  const std::lock_guard lock(mutex_);
  return context_;
}

Status TlsServer::reload() {
  std::string now = fingerprint();  // before reading: what changes meanwhile is read again
  auto context = server_context(files_);
  const std::lock_guard lock(mutex_);
  read_ = std::move(now);
  if (!context) return std::move(context).error();
  context_ = *std::move(context);
  return {};
}

Result<bool> TlsServer::reload_if_changed() {
  {
    std::string now = fingerprint();
    const std::lock_guard lock(mutex_);
    if (now == read_) return false;
  }
  if (Status read = reload(); !read) return std::move(read).error();
  return true;
}

std::string TlsServer::fingerprint() const {
  std::string out;
  for (const std::string* file : {&files_.certificate, &files_.key, &files_.client_ca}) {
    struct stat info {};
    if (file->empty() || ::stat(file->c_str(), &info) != 0) info = {};
    out += fmt::format("{}.{}.{}.{} ", info.st_ino, info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  }
  return out;
}

Result<std::shared_ptr<TlsClient>> TlsClient::make(TlsClientFiles files) {
  if (files.certificate.empty() != files.key.empty()) {
    return invalid("upstream_cert and upstream_key are given together, or neither", "upstream_key");
  }
  std::shared_ptr<TlsClient> client(new TlsClient(std::move(files)));  // the constructor is private
  if (client->files_.ca.empty() && client->files_.certificate.empty()) return client;
  if (auto context = client->context(); !context) return std::move(context).error();
  return client;
}

Result<std::shared_ptr<const TlsContext>> TlsClient::context() {
  const std::lock_guard lock(mutex_);
  if (context_) return context_;
  const auto context = std::make_shared<TlsContext>(/*server=*/false);
  ERR_clear_error();
  const std::string& ca = files_.ca;
  const int trusted = ca.empty() ? SSL_CTX_set_default_verify_paths(context->get())
                                 : SSL_CTX_load_verify_file(context->get(), ca.c_str());
  if (trusted != 1) return unusable_file("upstream_ca", ca.empty() ? "the system's store" : ca);
  if (!files_.certificate.empty()) {
    if (Status own = use_certificate(*context, files_.certificate, files_.key, "upstream_cert", "upstream_key"); !own) {
      return std::move(own).error();
    }
  }
  SSL_CTX_set_verify(context->get(), SSL_VERIFY_PEER, nullptr);
  context_ = context;
  return context_;
}

bool TlsStream::attach() {
  ssl_.reset(SSL_new(context_->get()));
  if (!ssl_) return false;
  BIO* bio = BIO_new(context_->bio());
  if (bio == nullptr) return false;
  BIO_set_data(bio, const_cast<int*>(&fd_));
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  return true;
}

std::unique_ptr<TlsStream> TlsStream::server(std::shared_ptr<const TlsContext> context, int fd) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context), fd));  // the constructor is private
  if (!stream->attach()) return nullptr;
  SSL_set_accept_state(stream->ssl_.get());
  return stream;
}

std::unique_ptr<TlsStream> TlsStream::client(std::shared_ptr<const TlsContext> context, int fd,
                                             const std::string& host) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context), fd));  // the constructor is private
  if (!stream->attach()) return nullptr;
  SSL* ssl = stream->ssl_.get();
  SSL_set_connect_state(ssl);
  std::array<unsigned char, sizeof(in6_addr)> address{};
  const bool literal = ::inet_pton(AF_INET, host.c_str(), address.data()) == 1 ||
                       ::inet_pton(AF_INET6, host.c_str(), address.data()) == 1;
  if (literal) {
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) != 1) return nullptr;
    return stream;
  }
  SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (SSL_set1_host(ssl, host.c_str()) != 1 || SSL_set_tlsext_host_name(ssl, host.c_str()) != 1) return nullptr;
  return stream;
}

TlsStream::~TlsStream() = default;

TlsStream::Error TlsStream::failed(int result) {
  wants_write_ = false;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ: return error::would_block;
    case SSL_ERROR_WANT_WRITE: wants_write_ = true; return error::would_block;
    case SSL_ERROR_ZERO_RETURN: return error::eof;
    default: break;
  }
  broken_ = true;
  failure_ = last_reason();
  if (const long verified = SSL_get_verify_result(ssl_.get()); verified != X509_V_OK) {
    failure_ += fmt::format(" ({})", X509_verify_cert_error_string(verified));
  }
  return error::connection_reset;
}

TlsStream::Error TlsStream::handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  return result == 1 ? Error() : failed(result);
}

TlsStream::Error TlsStream::read(std::span<char> into, size_t& count) {
  count = 0;
  ERR_clear_error();
  const int result = SSL_read_ex(ssl_.get(), into.data(), into.size(), &count);
  return result == 1 ? Error() : failed(result);
}

TlsStream::Error TlsStream::write(std::span<boost::asio::const_buffer>& buffers) {
  std::array<char, kRecordBytes> joined;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled as far as used
  for (;;) {
    while (!buffers.empty() && buffers.front().size() == 0) buffers = buffers.subspan(1);
    if (buffers.empty()) return {};
    const char* from = static_cast<const char*>(buffers.front().data());
    size_t size = std::min(buffers.front().size(), kRecordBytes);
    if (buffers.size() > 1 && size < kRecordBytes) {
      size = 0;
      for (const auto& buffer : buffers) {
        const size_t part = std::min(buffer.size(), kRecordBytes - size);
        if (part > 0) std::memcpy(joined.data() + size, buffer.data(), part);
        size += part;
      }
      from = joined.data();
    }
    size_t taken = 0;
    ERR_clear_error();
    const int result = SSL_write_ex(ssl_.get(), from, size, &taken);
    if (result != 1) return failed(result);
    while (taken > 0) {
      const size_t part = std::min(taken, buffers.front().size());
      buffers.front() += part;
      taken -= part;
      if (buffers.front().size() == 0) buffers = buffers.subspan(1);
    }
  }
}

bool TlsStream::readable_now() {
  char byte = 0;
  size_t count = 0;
  ERR_clear_error();
  const int result = SSL_peek_ex(ssl_.get(), &byte, 1, &count);
  return result == 1 || failed(result) != error::would_block;
}

void TlsStream::close_notify() {
  if (broken_ || SSL_in_init(ssl_.get()) != 0) return;
  ERR_clear_error();
  SSL_shutdown(ssl_.get());
  ERR_clear_error();
}

}  // namespace kindred::net
