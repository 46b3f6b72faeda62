// Event: the completion of the work that was in a stream when the event was recorded.
#pragma once

#include <memory>

#include "base/deadline.h"

namespace bucketwheel {

class Event {
 public:
  virtual ~Event() = default;
  // True when the work is done. Never blocks. DeviceError in a forked child if the work was not done at the fork.
  virtual bool query() const = 0;
  // Blocks the host until the work is done; false when the deadline passed first. On the CPU, without a deadline, the
  // calling thread may run the stream's queued tasks itself instead of sleeping ([Note: waiters help], host_queue.h),
  // so it must hold no lock that a task takes. A task's failure is not rethrown here, but reported through its Handle.
  // DeviceError in a forked child, and in a task that waits for itself or for what is queued behind it.
  virtual bool synchronize(Deadline deadline = {}) const = 0;
  // Seconds from `start` to this event. ValueError unless both were recorded with timing and are complete.
  virtual double elapsed_s(const Event& start) const = 0;
};

using EventRef = std::shared_ptr<Event>;

}  // namespace bucketwheel
