// What connects a reduce-scatter to the gradient shard it fills: the sums go block by block into a ShardAccumulator.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
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

inline void bind_bucket(py::module_& m) {
  py::class_<ShardSink, ReduceSink, std::shared_ptr<ShardSink>>(m, "ShardSink")
      .def(py::init<std::shared_ptr<PyShardAccumulator>>(), py::arg("accumulator"))
      .def("begin", &ShardSink::begin, py::arg("add"));
}

}  // namespace bucketwheel
