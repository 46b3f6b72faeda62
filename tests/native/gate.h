// What the tests of streams and pools share.
#pragma once

#include <atomic>
#include <thread>

#include "base/env.h"

namespace bucketwheel {

// Holds a stream back until it is opened. Made before the streams that it holds, so that it outlives their tasks.
struct Gate {
  std::atomic<bool> is_open{false};
  void open() { is_open = true; }
  void wait() const {
    while (!is_open) {
      std::this_thread::yield();
    }
  }
};

// With BW_HOST_STREAM=inline a task runs at once, so nothing can be held back.
inline bool is_inline() { return env().stream_inline; }

}  // namespace bucketwheel
