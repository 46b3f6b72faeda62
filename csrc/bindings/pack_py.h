// Bindings of kernels/pack.h and kernels/reduce.h, and of the constant by which copies choose their way.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "bindings/cuda_scratch.h"
#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "kernels/cpu_kernels.h"
#include "kernels/pack.h"
#include "kernels/pack_table_cuda.h"
#include "kernels/reduce.h"

namespace bucketwheel {

namespace py = pybind11;

// outputs[i] <- inputs[i], as copy_all() on the CPU.
inline void copy_all_cuda(int device, const std::vector<CopyItem>& items) {
  const StreamRef stream = current_stream({DeviceId::Kind::kCuda, device});
  py::gil_scoped_release unlocked;
  CudaScratch<CopyCudaTable>::with(device, *stream, [&](CopyCudaTable& table) { table.run(items, *stream); });
}

// outputs[i] <- inputs[i]: contiguous, equal numel (shapes may differ: a bucket slot is flat), all on one device. On
// CUDA in the caller's current stream.
inline void copy_lists(const py::sequence& outputs, const py::sequence& inputs) {
  const size_t count = py::len(outputs);
  BW_EXPECTS(py::len(inputs) == count,
             "outputs has " + std::to_string(count) + " tensors, inputs has " + std::to_string(py::len(inputs)));
  std::vector<CopyItem> items;
  std::vector<py::object> keep;
  DeviceId device;
  for (size_t i = 0; i < count; ++i) {
    const dlpack::Name to_name{"outputs", static_cast<int64_t>(i)};
    const dlpack::Name from_name{"inputs", static_cast<int64_t>(i)};
    keep.push_back(outputs[i]);
    const dlpack::Described to = dlpack::describe_on_any_device(keep.back(), to_name);
    keep.push_back(inputs[i]);
    const dlpack::Described from = dlpack::describe_on_any_device(keep.back(), from_name);
    device = i == 0 ? to.device : device;
    dlpack::expect_device(to, device, to_name);
    dlpack::expect_device(from, device, from_name);
    BW_EXPECTS(to.numel == from.numel, to_name.text() + " has shape " + to.shape_text() + ", " + from_name.text() +
                                           " has " + from.shape_text());
    BW_EXPECTS(to.is_contiguous(), to_name.text() + " is not contiguous");
    BW_EXPECTS(from.is_contiguous(), from_name.text() + " is not contiguous");
    items.push_back({to.data, from.data, to.numel, to.dtype, from.dtype});
  }
  if (device.kind == DeviceId::Kind::kCuda) {
    copy_all_cuda(device.index, items);
    return;
  }
  py::gil_scoped_release unlocked;
  copy_all(items);
}

// output <- the sum of `inputs` in list order, accumulated in float32 (float64: in float64); all contiguous and of
// one numel. The output is of the inputs' dtype, or float32 for inputs of 16 bits.
inline void reduce_list(py::handle output, const py::sequence& inputs) {
  const dlpack::Described to = dlpack::describe_item(output, {"output", 0});
  BW_EXPECTS(py::len(inputs) > 0 && to.is_contiguous(), "needs at least one input and a contiguous output");
  std::vector<const void*> from;
  DType dtype = DType::kFloat32;
  for (size_t i = 0; i < py::len(inputs); ++i) {
    const dlpack::Name name{"inputs", static_cast<int64_t>(i)};
    const dlpack::Described tensor = dlpack::describe_item(py::object(inputs[i]), name);
    dtype = i == 0 ? tensor.dtype : dtype;
    dlpack::expect_dtype(tensor, dtype, name);
    BW_EXPECTS(tensor.is_contiguous() && tensor.numel == to.numel,
               name.text() + " must be contiguous, with the output's shape " + to.shape_text());
    from.push_back(tensor.data);
  }
  const int world = static_cast<int>(from.size());
  if (to.dtype == dtype) {
    reduce_sum(from.data(), world, dtype, to.numel, to.data);
  } else {
    dlpack::expect_dtype(to, DType::kFloat32, {"output", 0});
    reduce_sum_fp32(from.data(), world, dtype, to.numel, static_cast<float*>(to.data));
  }
}

inline void bind_pack(py::module_& m) {
  m.def("cpu_isa", [] { return name_of(cpu_kernels().isa); });
  m.def("copy_all", &copy_lists, py::arg("outputs"), py::arg("inputs"));
  m.def("reduce_sum", &reduce_list, py::arg("output"), py::arg("inputs"));
  m.attr("PAST_CACHE_BYTES") = kPastCacheBytes;
}

}  // namespace bucketwheel
