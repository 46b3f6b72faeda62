// Bindings of kernels/norm.h, and what connects a reduce-scatter to the gradient shard that it fills.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "comm/comm.h"
#include "kernels/norm.h"
#include "window/grad_sink.h"

namespace bucketwheel {

namespace py = pybind11;

inline std::vector<std::pair<double, bool>> pairs_of(std::span<const SumSquares> results) {
  std::vector<std::pair<double, bool>> out;
  for (const SumSquares& result : results) {
    out.emplace_back(result.sumsq, result.bad);
  }
  return out;
}

// A list of tensors as it is now: another thread may change it while the GIL is released.
inline py::tuple tensors_of(const py::object& list) { return dlpack::sequence_of(list, "tensors"); }

inline std::vector<NormRow> norm_rows(const py::tuple& tensors, DeviceId device) {
  std::vector<NormRow> rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const dlpack::Name name{"tensors", static_cast<int64_t>(i)};
    const dlpack::Described tensor = dlpack::describe_item(py::object(tensors[i]), name, device);
    dlpack::expect_float(tensor, name);
    dlpack::expect_dense(tensor, name);
    rows.push_back({tensor.data, tensor.numel, tensor.dtype});
  }
  return rows;
}

// For each tensor (sum of squares, has it a non-finite element); its elements are taken in memory order.
inline std::vector<std::pair<double, bool>> sumsq_of_list(const py::object& list) {
  const py::tuple tensors = tensors_of(list);
  const std::vector<NormRow> rows = norm_rows(tensors, {});
  py::gil_scoped_release unlocked;
  return pairs_of(sumsq(rows));
}

// A contiguous block of values, for the accumulators; of any dtype if none is given.
inline dlpack::Described block_of(py::handle object, std::optional<DType> dtype, dlpack::Name name) {
  const dlpack::Described tensor = dlpack::describe_item(object, name);
  if (dtype) {
    dlpack::expect_dtype(tensor, *dtype, name);
  }
  BW_EXPECTS(tensor.is_contiguous(), name.text() + " is not contiguous");
  return tensor;
}

inline std::vector<ShardAccumulator::Segment> segments_of(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  std::vector<ShardAccumulator::Segment> segments;
  segments.reserve(pairs.size());
  for (const auto& [begin, end] : pairs) {
    segments.push_back({begin, end});
  }
  return segments;
}

// A gradient shard that a reduce-scatter fills block by block: on the communicator's stream, without the GIL. One pass at a
// time: start() only after the last pass has ended.
class PyShardAccumulator final : public GradSink {
 public:
  PyShardAccumulator(py::handle shard, const std::vector<std::pair<int64_t, int64_t>>& segments)
      : owner_(held(shard)), accumulator_(made(shard, segments)) {}
  void start(bool add) override { accumulator_.start(add); }
  void consume_tensor(int64_t begin, py::handle values) {
    const dlpack::Described block = block_of(values, shard_sum_dtype(accumulator_.dtype()), {"values", 0});
    accumulator_.consume(begin, block.data, block.numel);
  }
  const std::vector<SumSquares>& results() const { return accumulator_.results(); }

  bool takes(DType dtype) const override { return shard_takes(accumulator_.dtype(), dtype); }
  void consume(size_t, int64_t begin, const void* sum, int64_t numel) override {
    accumulator_.consume(begin, sum, numel);
  }

 private:
  static ShardAccumulator made(py::handle shard, const std::vector<std::pair<int64_t, int64_t>>& segments) {
    const dlpack::Described values = block_of(shard, std::nullopt, {"shard", 0});
    return {values.data, values.dtype, values.numel, segments_of(segments)};
  }

  std::shared_ptr<void> owner_;
  ShardAccumulator accumulator_;
};

// The sums of squares of whole parameters, out of those of their pieces.
class PyParamSums {
 public:
  using Piece = std::pair<std::shared_ptr<PyShardAccumulator>, int64_t>;  // and the segment of it

  void add(std::vector<Piece> pieces) {
    for (const auto& [accumulator, segment] : pieces) {
      const size_t count = accumulator->results().size();
      BW_EXPECTS(segment >= 0 && segment < static_cast<int64_t>(count),
                 "segment " + std::to_string(segment) + " of " + std::to_string(count));
    }
    params_.push_back(std::move(pieces));
  }

  // One double for each parameter, as bytes: NaN or infinite if any element is not finite; 0 where `has` is 0.
  py::bytes sums(std::string_view has) const {
    BW_EXPECTS(has.size() == params_.size(),
               std::to_string(has.size()) + " flags for " + std::to_string(params_.size()) + " parameters");
    std::vector<double> out(params_.size(), 0.0);
    for (size_t param = 0; param < params_.size(); ++param) {
      if (has[param] == 0) {
        continue;
      }
      for (const auto& [accumulator, segment] : params_[param]) {
        const SumSquares& piece = accumulator->results()[static_cast<size_t>(segment)];
        out[param] += piece.bad && std::isfinite(piece.sumsq) ? std::numeric_limits<double>::quiet_NaN() : piece.sumsq;
      }
    }
    return py::bytes(reinterpret_cast<const char*>(out.data()), out.size() * sizeof(double));
  }

 private:
  std::vector<std::vector<Piece>> params_;
};

inline void bind_norm(py::module_& m) {
  m.def("sumsq", &sumsq_of_list, py::arg("tensors"));
  m.def(
      "fold",
      [](const std::vector<double>& values) { return fold(values.data(), static_cast<int64_t>(values.size())); },
      py::arg("values"));
  const py::class_<GradSink, ReduceSink, std::shared_ptr<GradSink>> sink(m, "GradSink");
  py::class_<PyShardAccumulator, GradSink, std::shared_ptr<PyShardAccumulator>>(m, "ShardAccumulator")
      .def(py::init<py::handle, const std::vector<std::pair<int64_t, int64_t>>&>(), py::arg("shard"),
           py::arg("segments"))
      .def("start", &PyShardAccumulator::start, py::arg("add"))
      .def("consume", &PyShardAccumulator::consume_tensor, py::arg("begin"), py::arg("values"))
      .def("results", [](const PyShardAccumulator& self) { return pairs_of(self.results()); });
  py::class_<PyParamSums>(m, "ParamSums")
      .def(py::init<>())
      .def("add", &PyParamSums::add, py::arg("pieces"))
      .def("sums", &PyParamSums::sums, py::arg("has"));
}

}  // namespace bucketwheel
