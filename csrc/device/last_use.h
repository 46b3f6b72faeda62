// LastUse: orders the uses of device memory that several streams use in turn.
#pragma once

#include "base/error.h"
#include "device/device_cuda.h"

namespace bucketwheel {

class LastUse {
 public:
  // Calls work(native, is_captured) with `stream`'s cudaStream_t. What it enqueues runs behind the last use and
  // becomes the last use, also if it throws half-way. ValueError, naming `what`, when `stream` is no CUDA stream.
  // Nothing inside a CUDA graph can wait for anything outside, or be waited for: a captured use waits for nothing and
  // nothing waits for it. The caller synchronises before a capture and before a replay.
  template <class Work>
  void in(Stream& stream, const char* what, Work&& work) {
    void* const native = native_stream(stream, what);
    const bool is_captured = is_capturing(stream);
    if (event_ != nullptr && native != stream_ && !is_captured) {
      stream.wait(event_);
    }
    try {
      work(native, is_captured);
    } catch (...) {
      try {
        note(stream, native, is_captured);
      } catch (const Error&) {  // the device is in trouble; the first error says what it is
      }
      throw;
    }
    note(stream, native, is_captured);
  }

 private:
  void note(Stream& stream, void* native, bool is_captured) {
    stream_ = native;
    event_ = is_captured ? nullptr : stream.record();
  }

  void* stream_ = nullptr;
  EventRef event_;  // of the last use; null: there is none to wait for
};

}  // namespace bucketwheel
