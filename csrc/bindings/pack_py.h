// Bindings of kernels/pack.h, and of the constant by which copies choose their way.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "kernels/cpu_kernels.h"
#include "kernels/pack.h"
#include "kernels/pack_table_cuda.h"

namespace bucketwheel {

namespace py = pybind11;

// outputs[i] <- inputs[i], None: zeros; contiguous, equal numel (shapes may differ: a bucket slot is flat), all on one
// device. Where adds[i]: outputs[i] += inputs[i]. On CUDA in the caller's current stream.
inline void copy_lists(const py::sequence& outputs, const py::sequence& inputs, const std::vector<bool>& adds) {
  const size_t count = py::len(outputs);
  BW_EXPECTS(py::len(inputs) == count,
             "outputs has " + std::to_string(count) + " tensors, inputs has " + std::to_string(py::len(inputs)));
  BW_EXPECTS(adds.empty() || adds.size() == count,
             "outputs has " + std::to_string(count) + " tensors, adds has " + std::to_string(adds.size()));
  std::vector<CopyItem> items;
  std::vector<py::object> keep;
  DeviceId device;
  for (size_t i = 0; i < count; ++i) {
    const dlpack::Name to_name{"outputs", static_cast<int64_t>(i)};
    const dlpack::Name from_name{"inputs", static_cast<int64_t>(i)};
    keep.push_back(outputs[i]);
    const dlpack::Described to = dlpack::describe_on_any_device(keep.back(), to_name);
    keep.push_back(inputs[i]);
    device = i == 0 ? to.device : device;
    dlpack::expect_device(to, device, to_name);
    CopyItem& item = items.emplace_back(CopyItem{to.data, nullptr, to.numel, to.dtype, to.dtype});
    item.add = !adds.empty() && adds[i];
    BW_EXPECTS(to.is_contiguous(), to_name.text() + " is not contiguous");
    if (keep.back().is_none()) {
      continue;
    }
    const dlpack::Described from = dlpack::describe_on_any_device(keep.back(), from_name);
    dlpack::expect_device(from, device, from_name);
    BW_EXPECTS(to.numel == from.numel, to_name.text() + " has shape " + to.shape_text() + ", " + from_name.text() +
                                           " has " + from.shape_text());
    BW_EXPECTS(from.is_contiguous(), from_name.text() + " is not contiguous");
    item.from = from.data;
    item.from_dtype = from.dtype;
  }
  const StreamRef stream = current_stream(device);
  py::gil_scoped_release unlocked;
  if (stream == nullptr) {  // on the CPU
    copy_all(items);
    return;
  }
  copy_all_cuda(device.index, items, *stream);
}

inline void bind_pack(py::module_& m) {
  m.def("cpu_isa", [] { return name_of(cpu_kernels().isa); });
  m.def("copy_all", &copy_lists, py::arg("outputs"), py::arg("inputs"), py::arg("adds") = std::vector<bool>());
}

}  // namespace bucketwheel
