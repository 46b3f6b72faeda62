#include "comm/handle.h"

#include <string>

#include "base/error.h"
#include "device/deferred_event.h"

namespace bucketwheel {

void Handle::rethrow() const {
  if (state_->error) {
    std::rethrow_exception(state_->error);
  }
}

void Handle::wait(Stream* stream) {
  if (stream == nullptr) {
    synchronize();
  } else {
    stream->wait(state_->done);
  }
}

void Handle::synchronize(Deadline deadline) {
  if (!state_->done->synchronize(deadline)) {
    throw CommTimeout("operation " + std::to_string(state_->seq) + " (" + std::to_string(state_->size_bytes) +
                      " bytes) was still running at the deadline given to synchronize()");
  }
  rethrow();
}

bool Handle::is_ordered() const { return await_order(Clock::now()); }

bool Handle::await_order(Deadline deadline) const {
  if (state_->device.kind == DeviceId::Kind::kCpu) {
    return state_->done->query() || state_->done->synchronize(deadline);
  }
  const auto* deferred = dynamic_cast<const DeferredEvent*>(state_->done.get());
  return deferred == nullptr || deferred->await(deadline) != nullptr;
}

bool Handle::query() const {
  if (!state_->done->query()) {
    return false;
  }
  rethrow();
  return true;
}

double Handle::elapsed_s(const Handle& later) const { return later.state_->done->elapsed_s(*state_->done); }

}  // namespace bucketwheel
