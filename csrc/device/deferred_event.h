// DeferredEvent: the completion of work that is not in a stream yet, because it waits for other threads first.
//
// A CUDA stream can wait only for an event that has been recorded. So making a stream wait for a DeferredEvent blocks
// the host until the work is in a stream and a recorded event stands for it (not until that event has completed).
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
  // Threads that wait or query call `poll` about every 50 ms, while they hold none of our locks. It throws if the wait
  // is to end.
  explicit DeferredEvent(std::function<void()> poll) : poll_(std::move(poll)) {}

  // Sets the event that it stands for, or the error. The first call of either counts.
  void resolve(EventRef event);
  void fail(std::exception_ptr error);
  // Waits for the event it stands for; null when the deadline passed first. Throws the error of fail().
  EventRef await(Deadline deadline = {}) const;

  // As for the event it stands for; false while there is none. They throw the error of fail(), or of `poll`.
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
