#include "device/deferred_event.h"

#include <chrono>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kPoll{50};

}  // namespace

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

// With the lock held.
EventRef DeferredEvent::resolved() const {
  if (error_) {
    std::rethrow_exception(error_);
  }
  return event_;
}

void DeferredEvent::poll_sometimes() const {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  Clock::rep next = next_poll_.load(std::memory_order_relaxed);
  if (poll_ && now >= next && next_poll_.compare_exchange_strong(next, now + Clock::duration(kPoll).count())) {
    poll_();
  }
}

EventRef DeferredEvent::await(Deadline deadline) const {
  std::unique_lock lock(mutex_);
  while (resolved() == nullptr) {
    lock.unlock();
    poll_sometimes();
    lock.lock();
    if (resolved() != nullptr || has_passed(deadline)) {
      break;
    }
    changed_.wait_until(lock, earlier(deadline, Clock::now() + kPoll));
  }
  return event_;
}

bool DeferredEvent::query() const {
  const EventRef event = await(Clock::now());
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
