// DeferredEvent: the completion of work that is not in a stream yet, because other threads have to come first.
//
// CUDA streams can wait only for events that have been recorded. Whoever asks this one to be waited for blocks the host
// until it stands for a recorded event (not until that has completed).
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>

#include "device/event.h"

namespace bucketwheel {

class DeferredEvent final : public Event {
 public:
  // `poll` is called about every 50 ms by threads that wait or ask, while they hold none of our locks. It throws what
  // ended the waiting.
  explicit DeferredEvent(std::function<void()> poll) : poll_(std::move(poll)) {}

  // What it stands for; the first call of either counts.
  void resolve(EventRef event);
  void fail(std::exception_ptr error);
  // The event it stands for; null when the deadline passed first. Throws what fail() was given.
  EventRef await(Deadline deadline = {}) const;

  // As for the event it stands for; false before. They throw what fail() was given, or what `poll` throws.
  bool query() const override;
  bool synchronize(Deadline deadline) const override;
  double elapsed_s(const Event& start) const override;

 private:
  EventRef resolved() const;
  void poll_sometimes() const;

  const std::function<void()> poll_;
  mutable std::atomic<Clock::rep> next_poll_{0};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  EventRef event_;
  std::exception_ptr error_;
};

}  // namespace bucketwheel
