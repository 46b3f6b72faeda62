// Handle: the completion of one collective, and the owner of everything the collective reads or writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/event.h"
#include "device/stream.h"
#include "pool/pool.h"

namespace bucketwheel {

// How an operation ended. What comes first stands. Thread-safe.
class Outcome {
 public:
  // The operation is done. False when it has failed before.
  bool complete();
  // The operation has failed, unless it was done.
  void fail(std::exception_ptr error);
  // Throws what it failed with; returns when it has not.
  void rethrow() const;

 private:
  enum class State : uint8_t { kRunning, kDone, kFailed };
  std::atomic<State> state_{State::kRunning};
  std::mutex mutex_;          // of fail()
  std::exception_ptr error_;  // written before kFailed, and not after
};

class Handle {
 public:
  // What the operation keeps alive: tensors, leases, events. Freed after completion, on any thread,
  // without the GIL.
  using Keepalive = std::shared_ptr<void>;

  // Makes `stream` wait for the operation. Null: the calling host thread (CPU): the same as synchronize().
  void wait(Stream* stream);
  // Blocks the host. Throws the operation's error (PeerError, CommTimeout, ...) on every call; CommTimeout when
  // `deadline` passes first, which leaves the operation running.
  void synchronize(Deadline deadline = {});
  // True when complete. Never blocks; throws the operation's error.
  bool query() const;
  // Seconds between the completion of two handles made with timing = true; negative if `later` came first.
  double elapsed_s(const Handle& later) const;

  uint64_t seq() const { return state_->seq; }              // of its communicator, counted from 1
  size_t size_bytes() const { return state_->size_bytes; }  // bytes of the full buffers
  DeviceId device() const { return state_->device; }
  // Whether a stream can wait for the operation, and memory be given on behind it, without waiting for a peer to
  // issue it: on the CPU when it is over, on CUDA when it is in a stream and, as far as Comm::sees_peers(), in those
  // of all ranks.
  bool is_ordered() const;
  // Blocks until is_ordered() or the deadline; which.
  bool await_order(Deadline deadline) const;
  // Whether it is part of a CUDA graph, and so has no completion outside of that.
  bool is_captured() const;
  const EventRef& event() const { return state_->done; }  // completes when the operation is over, failed or not

  // What the communicator and the handle share; set before the handle is given out, but for `outcome`, and for
  // `keepalive`, which is emptied when the operation is over. On the CPU only the operation's task ends it: `outcome`
  // is known when `done` completes. On CUDA the event of an aborted operation completes too, so that it proves nothing,
  // and the operation may fail before.
  struct State {
    uint64_t seq = 0;
    const char* op = "";
    std::shared_ptr<const std::string> who;  // whose operation it is, for messages
    size_t size_bytes = 0;
    DeviceId device;
    EventRef done;
    std::function<bool()> is_met;  // CUDA: whether all ranks have issued it; null: known otherwise, or not known
    mutable Outcome outcome;
    std::vector<Keepalive> keepalive;
  };
  explicit Handle(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  bool await_done(Deadline deadline) const;
  std::shared_ptr<const State> state_;
};
using HandleRef = std::shared_ptr<Handle>;

}  // namespace bucketwheel
