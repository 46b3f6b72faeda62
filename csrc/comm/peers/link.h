// Link: a TCP connection to a process of another host, by which this process knows that the other one lives.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memfd.h"

namespace bucketwheel {

// [Note: ranks of several hosts]
// Each process has one Link to the process of the next rank, and so one from the rank before; communicators of the same
// two processes share it. It carries one kind of message: that a process has left a communicator in order.
//
//   what is seen at a Link                  what it means
//   message "left"                          the rank is gone; whoever needs it later fails
//   end of the stream, or a reset           the process has ended: it is dead to every communicator it has not left
//   silence for heartbeat_timeout_s         the host is lost; the kernels of both hosts exchange keepalives, so a process
//                                           that is stopped, or holds the GIL, is not silent
//
// The watchdog looks at Links without the GIL (StorePeers::look). What a rank fails with, its own error or the death of a
// neighbour, goes into one key of the torch Store, where the first failure stays (compare_set). One thread of Python's per
// process (comm/peers.py) writes that key and reads it about ten times a second, for all communicators, so every rank
// has the same error. A Bell wakes the thread when there is something to write. If the Store does not answer within
// kPatience.peer, the two neighbours of a dead rank fail by what they have seen themselves.
class Link {
 public:
  enum class State : uint8_t {
    kOpen,   // from the making on
    kEnded,  // the other end has hung up
    kLost,   // the other host has been silent for too long, or cannot be reached
  };
  // `socket` is connected, and both ends know each other.
  Link(FileDescriptor socket, std::chrono::nanoseconds heartbeat_timeout);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // The rest is thread-safe and never blocks.
  // Reads what has come.
  State look() noexcept;
  // Tells the other process that this one has left the communicator `id`.
  void tell_left(uint64_t id) noexcept;
  // Whether the other process has left it, as far as look() has read.
  bool has_left(uint64_t id) const;

 private:
  const uint64_t fork_generation_;
  mutable std::mutex mutex_;
  FileDescriptor socket_;
  State state_ = State::kOpen;
  std::vector<uint64_t> left_;  // by the other process; kept, for look() may read it long before it is asked for
  uint64_t message_ = 0;        // read so far, received_ bytes of it
  size_t received_ = 0;
};
using LinkRef = std::shared_ptr<Link>;

}  // namespace bucketwheel
