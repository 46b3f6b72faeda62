// Peers: what the ranks of a communicator know of each other beside the data that it moves: that they live, what their
// hosts agree on, and why one of them failed. Ranks that share a host have the control segment for it (HostComm),
// others the torch Store and a process group of the CPU (StorePeers).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/health.h"

namespace bucketwheel {

class Peers {
 public:
  virtual ~Peers() = default;
  virtual Health& health() = 0;
  // Of an operation, and of a round of agreement.
  virtual std::chrono::nanoseconds timeout() const = 0;
  Deadline timeout_from_now() const { return Clock::now() + timeout(); }

  // As Comm::post() and Comm::collect().
  virtual void post(std::span<const std::byte> payload) = 0;
  virtual std::vector<std::vector<std::byte>> collect(Deadline deadline, const std::function<void()>& poll) = 0;

  // Throws when the communicator has failed, or must now: a rank has failed at `seq` or before, or one for which
  // needs(rank) holds is dead or has left.
  virtual void expect_peers(uint64_t seq, const std::function<bool(int)>& needs) = 0;
  // Makes `failure` the communicator's error, unless it has one, and tells the peers. Returns the error that stands.
  // The message begins with `prefix`.
  virtual std::exception_ptr fail(const Failure& failure, const std::string& prefix) = 0;
  // Says goodbye to the peers; later calls throw ClosedError. Idempotent.
  virtual void leave(Deadline deadline) = 0;
};
using PeersRef = std::shared_ptr<Peers>;

}  // namespace bucketwheel
