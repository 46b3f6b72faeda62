// Bindings of the sums of squares, the clip kernel and the gradient shards on CUDA. Results stay on the device, in
// tensors that the caller gives; everything runs in the caller's current stream and nothing blocks.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/adam_cuda_py.h"
#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "bindings/norm_py.h"
#include "comm/comm.h"
#include "kernels/cuda_scratch.h"
#include "kernels/sums_cuda.h"

namespace bucketwheel {

namespace py = pybind11;

// sums[i] = the sum of squares of tensors[i]: float64, as sumsq() on the CPU; total = their fold. `table`: null for
// one of ours.
inline void sumsq_cuda(int device, const py::object& list, py::handle sums, py::handle total, SumsqCudaTable* table) {
  const DeviceId id{DeviceId::Kind::kCuda, device};
  const py::tuple tensors = tensors_of(list);
  const std::vector<NormRow> rows = norm_rows(tensors, id);
  auto* const out = device_array<double>(sums, DType::kFloat64, id, static_cast<int64_t>(rows.size()), "sums");
  auto* const all = device_array<double>(total, DType::kFloat64, id, 1, "total");
  const StreamRef stream = current_stream(id);
  py::gil_scoped_release unlocked;
  if (table != nullptr) {
    table->run(rows, out, all, *stream);
    return;
  }
  with_cuda_scratch<SumsqCudaTable>(device, *stream,
                                    [&](SumsqCudaTable& shared) { shared.run(rows, out, all, *stream); });
}

// param_sums[i] = the sums of parameter i's rows added in order, 0 where held[i] is 0: ParamSumsLaunch.
inline void param_sums_cuda(int device, py::handle sums, py::handle first_row_of, py::handle rows_of, py::handle held,
                            py::handle param_sums) {
  const DeviceId id{DeviceId::Kind::kCuda, device};
  ParamSumsLaunch launch;
  launch.param_count = dlpack::describe(param_sums).numel;
  launch.param_sums = device_array<double>(param_sums, DType::kFloat64, id, -1, "param_sums");
  launch.sums = device_array<const double>(sums, DType::kFloat64, id, -1, "sums");
  launch.first_row_of =
      device_array<const int64_t>(first_row_of, DType::kInt64, id, launch.param_count + 1, "first_row_of");
  launch.rows_of = device_array<const int64_t>(rows_of, DType::kInt64, id, -1, "rows_of");
  launch.held = device_array<const uint8_t>(held, DType::kUInt8, id, launch.param_count, "held");
  const StreamRef stream = current_stream(id);
  py::gil_scoped_release unlocked;
  CudaGuard guard(device);
  BW_CUDA_TRY(launch_param_sums, launch, native_stream(*stream, "param_sums"));
}

// sums[i] = parameter i's elements of by_rank, float64 [world, params], added in rank order: RankSumsLaunch.
inline void rank_sums_cuda(int device, py::handle by_rank, py::handle sums) {
  const DeviceId id{DeviceId::Kind::kCuda, device};
  RankSumsLaunch launch;
  launch.param_count = dlpack::describe(sums).numel;
  const dlpack::Described ranks = dlpack::describe(by_rank);
  BW_EXPECTS(ranks.shape.size() == 2 && ranks.shape[1] == launch.param_count,
             "by_rank has shape " + ranks.shape_text() + ", not [ranks, " + std::to_string(launch.param_count) + "]");
  launch.world = static_cast<int>(ranks.shape[0]);
  launch.by_rank = device_array<const double>(by_rank, DType::kFloat64, id, ranks.numel, "by_rank");
  launch.sums = device_array<double>(sums, DType::kFloat64, id, launch.param_count, "sums");
  const StreamRef stream = current_stream(id);
  py::gil_scoped_release unlocked;
  CudaGuard guard(device);
  BW_CUDA_TRY(launch_rank_sums, launch, native_stream(*stream, "rank_sums"));
}

// The norm of the chosen gradients into `norm` (float32 or float64 [1]: ClipLaunch::is_double), and their factors
// times the clip coefficient if max_norm is given: ClipLaunch. `param_sums`: float64 [params], over all ranks.
inline void clip_cuda(int device, py::handle param_sums, py::handle factors, py::handle chosen, double average,
                      std::optional<double> max_norm, py::handle norm, py::handle param_norms, bool resets) {
  const DeviceId id{DeviceId::Kind::kCuda, device};
  ClipLaunch launch;
  launch.param_count = dlpack::describe(factors).numel;
  launch.param_sums = device_array<const double>(param_sums, DType::kFloat64, id, launch.param_count, "param_sums");
  launch.factors = device_array<double>(factors, DType::kFloat64, id, launch.param_count, "factors");
  launch.chosen = device_array<const uint8_t>(chosen, DType::kUInt8, id, launch.param_count, "chosen");
  launch.average = average;
  launch.clips = max_norm.has_value();
  launch.resets = resets;
  launch.max_norm = max_norm.value_or(0.0);
  launch.is_double = dlpack::describe_on_any_device(norm, {"norm", 0}).dtype == DType::kFloat64;
  launch.norm = device_array<void>(norm, launch.is_double ? DType::kFloat64 : DType::kFloat32, id, 1, "norm");
  launch.param_norms = device_array<double>(param_norms, DType::kFloat64, id, launch.param_count, "param_norms");
  const StreamRef stream = current_stream(id);
  py::gil_scoped_release unlocked;
  CudaGuard guard(device);
  BW_CUDA_TRY(launch_clip, launch, native_stream(*stream, "clip"));
}

// ShardAccumulatorCuda with what it writes to; what a reduce-scatter on CUDA fills.
class PyShardAccumulatorCuda final : public GradSink {
 public:
  PyShardAccumulatorCuda(py::handle shard, const std::vector<std::pair<int64_t, int64_t>>& segments, py::handle sums)
      : shard_owner_(held(shard)), sums_owner_(held(sums)), accumulator_(made(shard, segments, sums)) {}
  void start(bool add) override { accumulator_.start(add); }
  int64_t span_of(size_t segment) const { return accumulator_.span_of(segment); }

  bool takes(DType dtype) const override { return shard_takes(accumulator_.dtype(), dtype); }
  void consume(size_t, int64_t, const void*, int64_t) override {
    throw TypeError("the sink takes sums in device memory, but the communicator is on the cpu");
  }
  void enqueue(size_t, std::span<const void* const> sources, DType dtype, int64_t numel, Stream& stream) override {
    accumulator_.run(sources, dtype, numel, stream);
  }

 private:
  static ShardAccumulatorCuda made(py::handle shard, const std::vector<std::pair<int64_t, int64_t>>& segments,
                                   py::handle sums) {
    const dlpack::Described values = dlpack::describe_on_any_device(shard, {"shard", 0});
    BW_EXPECTS(values.device.kind == DeviceId::Kind::kCuda, "shard is not on a CUDA device");
    BW_EXPECTS(values.is_contiguous(), "shard is not contiguous");
    const std::vector<ShardAccumulator::Segment> pieces = segments_of(segments);
    auto* const out = device_array<double>(sums, DType::kFloat64, values.device,
                                           ShardAccumulatorCuda::max_spans(pieces.size()), "sums");
    return {CudaDevice::at(values.device.index), values.data, values.dtype, values.numel, pieces, out};
  }

  std::shared_ptr<void> shard_owner_;
  std::shared_ptr<void> sums_owner_;
  ShardAccumulatorCuda accumulator_;
};

inline void bind_norm_cuda(py::module_& m) {
  py::class_<SumsqCudaTable>(m, "SumsqCudaTable")
      .def(py::init([](int device) { return std::make_unique<SumsqCudaTable>(CudaDevice::at(device)); }),
           py::arg("device"));
  m.def("sumsq_cuda", &sumsq_cuda, py::arg("device"), py::arg("tensors"), py::arg("sums"),
        py::arg("total").none(true) = py::none(), py::arg("table").none(true) = py::none());
  m.def("param_sums_cuda", &param_sums_cuda, py::arg("device"), py::arg("sums"), py::arg("first_row_of"),
        py::arg("rows_of"), py::arg("held").none(true), py::arg("param_sums"));
  m.def("rank_sums_cuda", &rank_sums_cuda, py::arg("device"), py::arg("by_rank"), py::arg("sums"));
  m.def("clip_cuda", &clip_cuda, py::arg("device"), py::arg("param_sums"), py::arg("factors"),
        py::arg("chosen").none(true), py::arg("average"), py::arg("max_norm").none(true), py::kw_only(),
        py::arg("norm"), py::arg("param_norms").none(true) = py::none(), py::arg("resets") = false);
  py::class_<PyShardAccumulatorCuda, GradSink, std::shared_ptr<PyShardAccumulatorCuda>>(m, "ShardAccumulatorCuda")
      .def(py::init<py::handle, const std::vector<std::pair<int64_t, int64_t>>&, py::handle>(), py::arg("shard"),
           py::arg("segments"), py::arg("sums"))
      .def("start", &PyShardAccumulatorCuda::start, py::arg("add"))
      .def("span_of", &PyShardAccumulatorCuda::span_of, py::arg("segment"))
      .def_static("max_spans", &ShardAccumulatorCuda::max_spans, py::arg("segments"));
}

}  // namespace bucketwheel
