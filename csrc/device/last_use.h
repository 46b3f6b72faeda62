// LastUse: puts the uses of device memory that several streams take in turns one behind the other.
#pragma once

#include <exception>

#include "base/error.h"
#include "device/device_cuda.h"

namespace bucketwheel {

class LastUse {
 public:
  // Calls work(native, is_captured) with `stream`'s cudaStream_t; what it enqueues comes behind the last use and is
  // the last use then, also where it throws half-way. ValueError, naming `what`, when the stream is not one of CUDA.
  // A graph cannot wait for what is outside, nor anything outside for what is inside: a captured use waits for
  // nothing and nothing waits for it. Whoever captures or replays has synchronised before.
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
  EventRef event_;  // null: none that a stream could wait for
};

}  // namespace bucketwheel
