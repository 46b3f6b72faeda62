// Bindings of kernels/pack.h, for tests.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "kernels/cpu_kernels.h"
#include "kernels/pack.h"
#include "kernels/pack_table_cuda.h"

namespace bucketwheel {

namespace py = pybind11;

// copy_all() for its tests: outputs[i] <- inputs[i] (None: zeros), or += where adds[i]. The tensors are contiguous, of equal
// numel, and on one device; on CUDA in the caller's current stream.
inline void copy_lists(const py::list& outputs, const py::list& inputs, const std::vector<bool>& adds) {
  std::vector<CopyItem> items;
  DeviceId device;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const dlpack::Described to = dlpack::describe_on_any_device(outputs[i], {"outputs", index});
    device = to.device;
    items.push_back({to.data, nullptr, to.numel, to.dtype, to.dtype, !adds.empty() && adds.at(i)});
    if (!inputs[i].is_none()) {
      const dlpack::Described from = dlpack::describe_on_any_device(inputs[i], {"inputs", index});
      items.back().from = from.data;
      items.back().from_dtype = from.dtype;
    }
  }
  const StreamRef stream = current_stream(device);
  py::gil_scoped_release unlocked;
  stream == nullptr ? copy_all(items) : copy_all_cuda(device.index, items, *stream);
}

inline void bind_pack(py::module_& m) {
  m.def("cpu_isa", [] { return name_of(cpu_kernels().isa); });
  m.def("copy_all", &copy_lists, py::arg("outputs"), py::arg("inputs"), py::arg("adds") = std::vector<bool>());
}

}  // namespace bucketwheel
