// What connects a reduce-scatter to the gradient shard it fills: the sums go block by block into a ShardAccumulator.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <optional>
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
  bool takes(DType dtype) const override { return shard_takes(accumulator_->accumulator().dtype(), dtype); }
  void consume(size_t, int64_t begin, const void* sum, int64_t numel) override {
    accumulator_->accumulator().consume(begin, sum, numel);
  }

 private:
  std::shared_ptr<PyShardAccumulator> accumulator_;
};

// Stores the sums in host memory: in float32, or in float64 those of float64. Has no state: passes may be issued while
// others have yet to run.
class StoringSink final : public ReduceSink {
 public:
  explicit StoringSink(py::handle to) : to_(block_of(to, std::nullopt, {"to", 0})), owner_(held(to)) {
    if (to_.dtype != DType::kFloat64) {
      dlpack::expect_dtype(to_, DType::kFloat32, {"to", 0});
    }
  }
  bool takes(DType dtype) const override { return shard_takes(to_.dtype, dtype); }
  void consume(size_t, int64_t begin, const void* sum, int64_t numel) override {
    BW_EXPECTS(begin + numel <= to_.numel, "a block that ends at " + std::to_string(begin + numel) +
                                               " in a buffer of " + std::to_string(to_.numel) + " elements");
    const size_t bytes = size_of(to_.dtype);
    std::memcpy(static_cast<std::byte*>(to_.data) + static_cast<size_t>(begin) * bytes, sum,
                static_cast<size_t>(numel) * bytes);
  }

 private:
  const dlpack::Described to_;
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
