#include "comm/peers/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fork.h"

namespace bucketwheel {
namespace {

void set_option(int socket, int level, int option, int value, const char* name) {
  if (setsockopt(socket, level, option, &value, sizeof(value)) != 0) {
    throw Error(std::string("a link between hosts cannot have ") + name + " " + std::to_string(value) + ": " +
                std::generic_category().message(errno));
  }
}

// After a third of the time limit without a byte the kernel asks the other one for an answer, again and again. The
// connection ends when the time limit has passed without one, also when what this side has sent is not acknowledged.
void keep_alive(int socket, std::chrono::nanoseconds timeout) {
  const int timeout_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(timeout).count());
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(timeout_ms / 3000, 1), "TCP_KEEPIDLE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(timeout_ms / 6000, 1), "TCP_KEEPINTVL");
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, timeout_ms, "TCP_USER_TIMEOUT");
}

Link::State state_after(int error) {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case ENETDOWN:
      return Link::State::kLost;
    default:
      return Link::State::kEnded;
  }
}

}  // namespace

Link::Link(FileDescriptor socket, std::chrono::nanoseconds heartbeat_timeout)
    : fork_generation_(fork_generation()), socket_(std::move(socket)) {
  keep_alive(socket_.get(), heartbeat_timeout);
  close_in_child(socket_.get());
}

Link::~Link() {
  if (fork_generation_ != fork_generation()) {
    (void)socket_.release();  // closed already, [Note: fork]; the number may be another file's by now
    return;
  }
  look();  // to close a socket with unread bytes resets the connection, and what was sent last may be lost
  keep_in_child(socket_.get());
}

Link::State Link::look() noexcept {
  std::lock_guard lock(mutex_);
  while (state_ == State::kOpen) {
    const ssize_t size = recv(socket_.get(), reinterpret_cast<std::byte*>(&message_) + received_,
                              sizeof(message_) - received_, MSG_DONTWAIT);
    if (size > 0) {
      received_ += static_cast<size_t>(size);
      if (received_ == sizeof(message_)) {
        left_.push_back(message_);
        received_ = 0;
      }
    } else if (size == 0) {
      state_ = State::kEnded;
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      state_ = state_after(errno);
    }
  }
  return state_;
}

void Link::tell_left(uint64_t id) noexcept {
  std::lock_guard lock(mutex_);
  (void)send(socket_.get(), &id, sizeof(id), MSG_DONTWAIT | MSG_NOSIGNAL);  // who has gone need not hear it
}

bool Link::has_left(uint64_t id) const {
  std::lock_guard lock(mutex_);
  return std::ranges::find(left_, id) != left_.end();
}

}  // namespace bucketwheel
