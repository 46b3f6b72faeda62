#include "comm/handle.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/failure.h"
#include "device/deferred_event.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kSlice{50};
constexpr std::chrono::microseconds kLook{50};  // between two looks at what peers have issued

}  // namespace

bool Outcome::complete() {
  State expected = State::kRunning;
  return state_.compare_exchange_strong(expected, State::kDone) || expected == State::kDone;
}

void Outcome::fail(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kRunning) {
    error_ = std::move(error);
    State expected = State::kRunning;
    state_.compare_exchange_strong(expected, State::kFailed);
  }
}

void Outcome::rethrow() const {
  if (state_ == State::kFailed) {
    std::rethrow_exception(error_);
  }
}

void Handle::wait(Stream* stream) {
  if (stream == nullptr) {
    synchronize();
    return;
  }
  state_->outcome.rethrow();
  stream->wait(state_->done);
}

bool Handle::await_done(Deadline deadline) const {
  if (state_->device.kind == DeviceId::Kind::kCpu) {
    return state_->done->synchronize(deadline);  // not in slices: who waits without a deadline helps the worker
  }
  // In slices: an operation may fail while the device cannot be made to give it up.
  while (!state_->done->synchronize(earlier(deadline, Clock::now() + kSlice))) {
    state_->outcome.rethrow();
    if (has_passed(deadline)) {
      return false;
    }
  }
  return true;
}

void Handle::synchronize(Deadline deadline) {
  state_->outcome.rethrow();
  if (!await_done(deadline)) {
    const std::string reason = std::string(state_->op) + " of " + std::to_string(state_->size_bytes) +
                               " bytes was still running at the deadline given to synchronize()";
    throw CommTimeout(prefix_of(*state_->who, state_->seq) + reason,
                      {.op = state_->op, .seq = state_->seq, .reason = reason});
  }
  state_->outcome.complete();
  state_->outcome.rethrow();
}

bool Handle::is_ordered() const { return await_order(Clock::now()); }

bool Handle::await_order(Deadline deadline) const {
  if (state_->device.kind == DeviceId::Kind::kCpu) {
    return state_->done->query() || state_->done->synchronize(deadline);
  }
  if (state_->is_met != nullptr) {
    const std::function<bool()>& is_met = state_->is_met;
    while (!is_met() && !state_->done->query()) {  // over, perhaps because it has failed
      if (has_passed(deadline)) {
        return false;
      }
      std::this_thread::sleep_for(kLook);
    }
    return true;
  }
  const auto* deferred = dynamic_cast<const DeferredEvent*>(state_->done.get());
  return deferred == nullptr || deferred->await(deadline) != nullptr;
}

bool Handle::query() const {
  state_->outcome.rethrow();
  if (!state_->done->query()) {
    return false;
  }
  state_->outcome.complete();
  state_->outcome.rethrow();
  return true;
}

bool Handle::is_captured() const { return belongs_to_graph(*state_->done); }

double Handle::elapsed_s(const Handle& later) const { return later.state_->done->elapsed_s(*state_->done); }

}  // namespace bucketwheel
