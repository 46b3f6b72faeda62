// Stream: a queue of work that runs in order.
#pragma once

#include <functional>
#include <memory>

#include "device/event.h"

namespace bucketwheel {

class Stream {
 public:
  virtual ~Stream() = default;
  // Enqueues `task`. Tasks run one at a time, in the order of the calls. A task must not throw. It is destroyed before
  // the events behind it complete. DeviceError when the stream is closed or belongs to a parent process (fork).
  virtual void run(std::function<void()> task) = 0;
  // An event that completes when everything enqueued so far has run.
  virtual EventRef record(bool timing = false) = 0;
  // What is enqueued from now on runs after `event`. Blocks the host only for a DeferredEvent (until it is in a
  // stream) and, on CUDA, for an event of the CPU.
  virtual void wait(const EventRef& event) = 0;
  // Blocks the host until the queue is empty; false on deadline.
  virtual bool synchronize(Deadline deadline = {}) = 0;
  // Runs what is queued, then ends the worker. Later calls of run(), record() and wait() throw DeviceError. Does not
  // wait for the worker when called from inside a task. Idempotent; the destructor closes too.
  virtual void close() noexcept = 0;
};

using StreamRef = std::shared_ptr<Stream>;

}  // namespace bucketwheel
