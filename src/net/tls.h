// TLS by OpenSSL on a non-blocking socket, for Wire. Asio's own ssl::stream would copy every byte once more and
// hold 34 KB of buffers per connection; here an idle connection holds none.
//
// Thread-safety: TlsServer and TlsClient are thread-safe and shared; a TlsStream is one connection's.
#pragma once

#include <openssl/ssl.h>

#include <boost/asio/buffer.hpp>
#include <boost/system/error_code.hpp>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/result.h"

namespace kindred::net {

// What connections of one kind share: certificates, and who is trusted. Immutable.
class TlsContext;

// Files in PEM.
struct TlsServerFiles {
  std::string certificate;  // with its chain
  std::string key;          // without a passphrase
  std::string client_ca;    // clients must present a certificate of one of these; empty: none is asked for
};

// The certificate in force. It can be replaced while connections go on: each keeps what it began with.
class TlsServer {
 public:
  // Error: kInvalid, naming the file.
  static Result<std::shared_ptr<TlsServer>> load(TlsServerFiles files);

  std::shared_ptr<const TlsContext> current() const;
  // Reads the files again. After an error all stays as it was.
  Status reload();
  // Only if a file has changed since it was last read, well or not. True: there is a new certificate.
  Result<bool> reload_if_changed();

 private:
  explicit TlsServer(TlsServerFiles files) : files_(std::move(files)) {}
  std::string fingerprint() const;  // of the files' sizes and times

  const TlsServerFiles files_;
  mutable std::mutex mutex_;
  std::shared_ptr<const TlsContext> context_;
  std::string read_;  // fingerprint of what was read last
};

// Files in PEM; each may be empty.
struct TlsClientFiles {
  std::string ca;                // peers must have a chain to one of these; empty: to the system's store
  std::string certificate, key;  // of our own, for peers that ask for one
};

// How peers are verified: by the host's name and the chain of their certificate.
class TlsClient {
 public:
  // Error: kInvalid for a file that cannot be read. The system's store is read at the first use.
  static Result<std::shared_ptr<TlsClient>> make(TlsClientFiles files);

  Result<std::shared_ptr<const TlsContext>> context();

 private:
  explicit TlsClient(TlsClientFiles files) : files_(std::move(files)) {}

  const TlsClientFiles files_;
  std::mutex mutex_;
  std::shared_ptr<const TlsContext> context_;
};

// One connection's end. Every call does what it can now and says would_block where the socket must become
// readable, or writable if wants_write().
class TlsStream {
 public:
  using Error = boost::system::error_code;

  // `fd` is borrowed. nullptr for want of memory.
  static std::unique_ptr<TlsStream> server(std::shared_ptr<const TlsContext> context, int fd);
  // `host`: a name, for SNI and the check of the certificate, or an address, for the check alone.
  static std::unique_ptr<TlsStream> client(std::shared_ptr<const TlsContext> context, int fd, const std::string& host);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  Error handshake();
  // Error eof only where the peer said that it ends; a connection that just breaks off is connection_reset.
  Error read(std::span<char> into, size_t& count);
  // Drops from the front of `buffers` what was taken. After would_block the same bytes must come again.
  Error write(std::span<boost::asio::const_buffer>& buffers);
  bool wants_write() const { return wants_write_; }
  bool readable_now();  // bytes, the end or a fault wait to be read
  void close_notify();  // as far as the socket takes it

  // Why the handshake failed, for a log.
  const std::string& failure() const { return failure_; }

 private:
  struct Free {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };
  TlsStream(std::shared_ptr<const TlsContext> context, int fd) : context_(std::move(context)), fd_(fd) {}
  bool attach();
  Error failed(int result);

  std::shared_ptr<const TlsContext> context_;
  const int fd_;
  std::unique_ptr<SSL, Free> ssl_;
  bool wants_write_ = false;
  bool broken_ = false;  // after a fatal error nothing more may be sent
  std::string failure_;
};

}  // namespace kindred::net
