// Device: where memory lives and streams run. The pool and the communicators are written against it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/event.h"
#include "device/stream.h"

namespace bucketwheel {

struct DeviceId {
  enum class Kind : uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;
  bool operator==(const DeviceId&) const = default;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceId id() const = 0;
  // A new ordered queue (CPU: with a worker of its own). `name` shows in debuggers (at most 15 characters are kept).
  virtual StreamRef new_stream(std::string name) = 0;
  // Sets bytes of this device's memory, in `stream`'s order; without a stream, before it returns.
  virtual void fill(void* data, int byte, size_t size_bytes, Stream* stream) = 0;
  // Copies this device's memory to the host; blocks until it is there. For checks, not for the training path.
  virtual void read(void* to, const void* from, size_t size_bytes) = 0;
};

// The process's CPU device. Lives until the process ends.
Device& cpu_device();
// Of the CPU; its tasks run on its worker alone, never on a thread that waits for them ([Note: waiters help]).
StreamRef new_worker_stream(std::string name);

}  // namespace bucketwheel
