// Flight ring: the last operations of a communicator, written out when it or one of its peers fails.
// `python -m bucketwheel flight DIR` compares the rings of all ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "comm/operation.h"

namespace bucketwheel {

class FlightRing {
 public:
  static constexpr size_t kCapacity = 1024;
  struct Identity {
    std::string comm;
    int rank = 0;
    int world = 1;
    const char* backend = "";
    std::string id{};  // of Health
  };
  explicit FlightRing(Identity identity) : identity_(std::move(identity)) {}

  // Thread-safe. Operations are known by their seq; one that fell out of the ring is ignored.
  void issued(const Operation& op, Clock::time_point now);
  void started(uint64_t seq) { reach(seq, State::kRunning); }
  void finished(uint64_t seq, bool is_ok) { reach(seq, is_ok ? State::kDone : State::kFailed); }
  void captured(uint64_t seq) { reach(seq, State::kCaptured); }

  // JSON: {"comm", "id", "rank", "world", "backend", "pid", "host", "written_at" (seconds since 1970), "now_s", "reason",
  // "operations": [{"seq", "kind", "tensors", "bytes", "state", "issued_s", "started_s", "finished_s"}]}, oldest first;
  // times on the steady clock of the host, like "now_s"; 0 when not reached. "captured" is the state of an operation
  // that belongs to a CUDA graph.
  std::string json(const std::string& reason) const;
  // To BW_TRACE_DIR/<comm>-<id>-rank<rank>.json, if that is set; what it wrote before is replaced. Never throws: the failure that
  // is being reported matters more than its report. Where it cannot be written stderr says so, once.
  void write(const std::string& reason) noexcept;
  bool has_tried() const { return has_tried_; }  // to write, whatever came of it

 private:
  enum class State : uint8_t { kIssued, kRunning, kDone, kFailed, kCaptured };
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
  void reach(uint64_t seq, State state);

  const Identity identity_;
  std::atomic<bool> has_tried_{false};
  std::mutex write_mutex_;
  bool has_complained_ = false;
  mutable std::mutex mutex_;
  std::array<Entry, kCapacity> entries_;
  uint64_t last_seq_ = 0;
};

}  // namespace bucketwheel
