// Sinks of the reduce-scatters of a window: the gradient shard, and the partial sums of HSDP.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"
#include "kernels/norm.h"

namespace bucketwheel {

// This rank's part of one bucket of the gradient shard, with the sums of squares of what arrives.
class GradSink : public ReduceSink {
 public:
  // The next pass adds to the shard, or replaces what it holds. Only after the last pass has ended.
  virtual void start(bool add) = 0;
};

// Stores sums in host memory: in float32, or in float64 those of float64. Has no state: passes may be issued while others
// have yet to run.
class StoringSink final : public ReduceSink {
 public:
  explicit StoringSink(const View& to) : to_(to) {}
  bool takes(DType dtype) const override { return shard_takes(to_.dtype, dtype); }
  void consume(size_t, int64_t begin, const void* sum, int64_t numel) override {
    BW_EXPECTS(begin + numel <= to_.numel, "a block that ends at " + std::to_string(begin + numel) +
                                               " in a buffer of " + std::to_string(to_.numel) + " elements");
    const size_t bytes = size_of(to_.dtype);
    std::memcpy(static_cast<std::byte*>(to_.data) + static_cast<size_t>(begin) * bytes, sum,
                static_cast<size_t>(numel) * bytes);
  }

 private:
  const View to_;
};

// Hands the first `numel` elements on: the rest of the gathered buffer is there because ranks have equal parts.
class FirstElements final : public ReduceSink {
 public:
  FirstElements(std::shared_ptr<ReduceSink> sink, int64_t numel) : sink_(std::move(sink)), numel_(numel) {}
  bool takes(DType dtype) const override { return sink_->takes(dtype); }
  void consume(size_t pair, int64_t begin, const void* values, int64_t numel) override {
    if (begin < numel_) {
      sink_->consume(pair, begin, values, std::min(numel, numel_ - begin));
    }
  }
  void enqueue(size_t pair, std::span<const void* const> sources, DType dtype, int64_t, Stream& stream) override {
    sink_->enqueue(pair, sources, dtype, numel_, stream);
  }

 private:
  std::shared_ptr<ReduceSink> sink_;
  const int64_t numel_;
};

}  // namespace bucketwheel
