// Stream: a queue of work that runs in order.
#pragma once

#include <functional>
#include <memory>

#include "device/event.h"

namespace bucketwheel {

class Stream {
 public:
  virtual ~Stream() = default;
  // Enqueues `task`. Tasks run one at a time, in the order of the calls. A task must not throw.
  // DeviceError when the stream is closed or belongs to a parent process (fork). When a task is over, it is destroyed
  // before the events behind it complete.
  virtual void run(std::function<void()> task) = 0;
  // An event that completes when everything enqueued so far has run.
  virtual EventRef record(bool timing = false) = 0;
  // What is enqueued from now on runs after `event`. Does not block the host, but for a DeferredEvent until it is in
  // a stream, and on CUDA for an event of the CPU.
  virtual void wait(const EventRef& event) = 0;
  // Blocks the host until the queue is empty; false on deadline.
  virtual bool synchronize(Deadline deadline = {}) = 0;
  // Runs what is queued, then ends the worker; later calls of run(), record() and wait() throw DeviceError. The
  // destructor closes. Called from inside a task, it does not wait for the worker. Idempotent.
  virtual void close() noexcept = 0;
};

using StreamRef = std::shared_ptr<Stream>;

}  // namespace bucketwheel
