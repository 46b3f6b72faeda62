// What connects a reduce-scatter to the gradient shard it fills: the sums go block by block into a ShardAccumulator.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "bindings/norm_py.h"
#include "comm/comm.h"

namespace bucketwheel {

namespace py = pybind11;

// Runs on the communicator's stream, without the GIL. One pass at a time: begin() only after the last pass has ended.
class ShardSink final : public ReduceSink {
 public:
  explicit ShardSink(std::shared_ptr<PyShardAccumulator> accumulator) : accumulator_(std::move(accumulator)) {}
  void begin(bool add) { accumulator_->start(add); }
  void consume(size_t, int64_t begin, const float* sum, int64_t numel) override {
    accumulator_->accumulator().consume(begin, sum, numel);
  }

 private:
  std::shared_ptr<PyShardAccumulator> accumulator_;
};

// Stores the sums in host memory, in float32. Has no state: passes may be issued while others have yet to run.
class StoringSink final : public ReduceSink {
 public:
  explicit StoringSink(py::handle to) : to_(float_block(to, {"to", 0})), owner_(held(to)) {}
  void consume(size_t, int64_t begin, const float* sum, int64_t numel) override {
    const auto end = static_cast<size_t>(begin + numel);
    BW_EXPECTS(end <= to_.size(), "a block that ends at " + std::to_string(end) + " in a buffer of " +
                                      std::to_string(to_.size()) + " elements");
    std::copy_n(sum, numel, const_cast<float*>(to_.data()) + begin);
  }

 private:
  std::span<const float> to_;
  std::shared_ptr<void> owner_;
};

inline void bind_bucket(py::module_& m) {
  py::class_<ShardSink, ReduceSink, std::shared_ptr<ShardSink>>(m, "ShardSink")
      .def(py::init<std::shared_ptr<PyShardAccumulator>>(), py::arg("accumulator"))
      .def("begin", &ShardSink::begin, py::arg("add"));
  py::class_<StoringSink, ReduceSink, std::shared_ptr<StoringSink>>(m, "StoringSink")
      .def(py::init<py::handle>(), py::arg("to"));
}

}  // namespace bucketwheel
