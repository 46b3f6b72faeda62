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
  // A new ordered queue with its own worker. `name` shows in debuggers (at most 15 characters are kept).
  virtual StreamRef new_stream(std::string name) = 0;
};

// The process's CPU device. Lives until the process ends.
Device& cpu_device();

}  // namespace bucketwheel
