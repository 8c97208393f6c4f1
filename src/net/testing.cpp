#include "net/testing.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/result.h"

namespace kindred::net::testing {
namespace {

using std::chrono::steady_clock;

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

}  // namespace

bool RawConnection::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool RawConnection::fill(steady_clock::time_point deadline) {
  if (ended_ || fd_ < 0) return false;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
  pollfd entry{fd_, POLLIN, 0};
  if (::poll(&entry, 1, static_cast<int>(std::max<int64_t>(0, left.count()))) <= 0) return false;
  std::string piece(64 * 1024, '\0');
  const ssize_t got = ::recv(fd_, piece.data(), piece.size(), 0);
  if (got <= 0) {
    ended_ = true;
    return false;
  }
  unread_.append(piece, 0, static_cast<size_t>(got));
  return true;
}

std::string RawConnection::read_until(std::string_view end, std::chrono::milliseconds wait) {
  const auto deadline = steady_clock::now() + wait;
  size_t at = unread_.find(end);
  while (at == std::string::npos && fill(deadline)) at = unread_.find(end);
  const size_t size = at == std::string::npos ? unread_.size() : at + end.size();
  std::string result = unread_.substr(0, size);
  unread_.erase(0, size);
  return result;
}

std::string RawConnection::read_bytes(size_t count, std::chrono::milliseconds wait) {
  const auto deadline = steady_clock::now() + wait;
  while (unread_.size() < count && fill(deadline)) {
  }
  std::string result = unread_.substr(0, count);
  unread_.erase(0, result.size());
  return result;
}

std::string RawConnection::read_message() {
  std::string message = read_head();
  std::string lower = message;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const std::string_view name = "\r\ncontent-length:";
  const size_t at = lower.find(name);
  if (at == std::string::npos) return message;
  return message + read_bytes(std::strtoul(lower.c_str() + at + name.size(), nullptr, 10));
}

std::string RawConnection::read_to_end(std::chrono::milliseconds wait) {
  const auto deadline = steady_clock::now() + wait;
  while (fill(deadline)) {
  }
  return std::exchange(unread_, {});
}

bool RawConnection::wait_closed(std::chrono::milliseconds wait) {
  read_to_end(wait);
  return ended_;
}

void RawConnection::shut_down_write() { ::shutdown(fd_, SHUT_WR); }

void RawConnection::close() {
  const std::lock_guard lock(closing_);
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void RawConnection::interrupt() {
  const std::lock_guard lock(closing_);
  if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

void RawConnection::reset() {
  const linger now{1, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close();
}

RawConnection raw_connect(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(port);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    ::close(fd);
    return RawConnection(-1);
  }
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return RawConnection(fd);
}

RawServer::RawServer(Script script) : script_(std::move(script)) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof(address);
  KINDRED_CHECK(::bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) == 0);
  KINDRED_CHECK(::listen(listener_, 64) == 0);
  KINDRED_CHECK(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept_loop(); });
}

RawServer::~RawServer() {
  ::shutdown(listener_, SHUT_RDWR);  // ends accept()
  acceptor_.join();
  ::close(listener_);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (RawConnection* connection : open_) connection->interrupt();
  }
  for (std::thread& script : scripts_) script.join();
}

void RawServer::accept_loop() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const int index = accepted_++;
    scripts_.emplace_back([this, fd, index] {
      RawConnection connection(fd);
      {
        const std::lock_guard lock(mutex_);
        open_.push_back(&connection);
        if (stopping_) connection.interrupt();
      }
      script_(connection, index);
      const std::lock_guard lock(mutex_);
      std::erase(open_, &connection);
    });
  }
}

}  // namespace kindred::net::testing
