// Links between ranks of a test, over the loopback.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <utility>

#include "check.h"
#include "comm/peers/link.h"

namespace bucketwheel {

inline std::pair<FileDescriptor, FileDescriptor> connected() {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  CHECK(listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  FileDescriptor one(socket(AF_INET, SOCK_STREAM, 0));
  CHECK(connect(one.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  FileDescriptor other(accept(listener.get(), nullptr, nullptr));
  CHECK(other.get() >= 0);
  return {std::move(one), std::move(other)};
}

inline std::pair<LinkRef, LinkRef> linked() {
  constexpr std::chrono::seconds kHeartbeatTimeout{30};
  auto [one, other] = connected();
  return {std::make_shared<Link>(std::move(one), kHeartbeatTimeout),
          std::make_shared<Link>(std::move(other), kHeartbeatTimeout)};
}

}  // namespace bucketwheel
