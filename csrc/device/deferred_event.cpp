#include "device/deferred_event.h"

#include <chrono>
#include <utility>

#include "base/error.h"

namespace bucketwheel {

void DeferredEvent::resolve(EventRef event) {
  std::lock_guard lock(mutex_);
  if (event_ == nullptr && error_ == nullptr) {
    event_ = std::move(event);
    changed_.notify_all();
  }
}

void DeferredEvent::fail(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  if (event_ == nullptr && error_ == nullptr) {
    error_ = std::move(error);
    changed_.notify_all();
  }
}

bool DeferredEvent::is_resolved() const {
  std::lock_guard lock(mutex_);
  return event_ != nullptr || error_ != nullptr;
}

// With the lock held.
EventRef DeferredEvent::resolved() const {
  if (error_) {
    std::rethrow_exception(error_);
  }
  return event_;
}

EventRef DeferredEvent::await(Deadline deadline) const {
  constexpr std::chrono::milliseconds kPoll{50};
  std::unique_lock lock(mutex_);
  while (resolved() == nullptr) {
    if (has_passed(deadline)) {
      return nullptr;
    }
    const Deadline next = earlier(deadline, Clock::now() + kPoll);
    if (changed_.wait_until(lock, *next) == std::cv_status::timeout && poll_) {
      lock.unlock();
      poll_();
      lock.lock();
    }
  }
  return event_;
}

bool DeferredEvent::query() const {
  EventRef event;
  {
    std::lock_guard lock(mutex_);
    event = resolved();
  }
  return event != nullptr && event->query();
}

bool DeferredEvent::synchronize(Deadline deadline) const {
  const EventRef event = await(deadline);
  return event != nullptr && event->synchronize(deadline);
}

double DeferredEvent::elapsed_s(const Event& start) const {
  const auto* other = dynamic_cast<const DeferredEvent*>(&start);
  const EventRef first = other != nullptr ? other->await(Clock::now()) : nullptr;
  const EventRef last = await(Clock::now());
  BW_EXPECTS(last != nullptr && (other == nullptr || first != nullptr), "elapsed_s: both events must be complete");
  return last->elapsed_s(other != nullptr ? *first : start);
}

}  // namespace bucketwheel
