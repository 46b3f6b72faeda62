// Flight ring: the last operations of a communicator, written out when it fails.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "comm/operation.h"

namespace bucketwheel {

class FlightRing {
 public:
  static constexpr size_t kCapacity = 1024;

  // Thread-safe. Operations are known by their seq; one that fell out of the ring is ignored.
  void issued(const Operation& op);
  void started(uint64_t seq);
  void finished(uint64_t seq, bool is_ok);

  // JSON: {"comm", "rank", "world", "backend", "reason", "operations": [{"seq", "kind", "tensors", "bytes", "state",
  // "issued_s", "started_s", "finished_s"}]}, oldest first; times on the steady clock, null when not reached.
  std::string json(const std::string& comm, int rank, int world, const char* backend, const std::string& reason) const;

 private:
  enum class State : uint8_t { kIssued, kRunning, kDone, kFailed };
  struct Entry {
    uint64_t seq = 0;
    Collective collective = Collective::kAllGather;
    State state = State::kIssued;
    size_t tensors = 0;
    size_t size_bytes = 0;
    double issued_s = 0;
    double started_s = 0;
    double finished_s = 0;
  };
  Entry* find(uint64_t seq);

  mutable std::mutex mutex_;
  std::array<Entry, kCapacity> entries_;
  uint64_t last_seq_ = 0;
};

}  // namespace bucketwheel
