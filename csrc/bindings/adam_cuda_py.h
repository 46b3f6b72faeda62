// Bindings of kernels/adam_table_cuda.h: the table that the optimizer keeps, and the one-call step over tensor lists.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/adam_py.h"
#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "kernels/adam_table_cuda.h"
#include "kernels/cuda_scratch.h"

namespace bucketwheel {

namespace py = pybind11;

// The memory of a contiguous tensor of `numel` (-1: any number of) elements on `device`; None gives null.
template <class T>
T* device_array(py::handle tensor, DType dtype, DeviceId device, int64_t numel, const char* what) {
  if (tensor.is_none()) {
    return nullptr;
  }
  const dlpack::Name name{what, 0};
  const dlpack::Described values = dlpack::describe_item(tensor, name, device);
  dlpack::expect_dtype(values, dtype, name);
  BW_EXPECTS(values.is_contiguous() && (numel < 0 || values.numel == numel),
             std::string(what) + " must be contiguous, of " + std::to_string(numel) + " elements; it has shape " +
                 values.shape_text());
  return static_cast<T*>(values.data);
}

// AdamArguments as the kernels' host side takes them; `lr` owns what the step's span shows.
struct AdamCudaStepHolder {
  AdamCudaStep step;
  std::vector<const float*> lr;

  AdamCudaStepHolder(const AdamArguments& from, const std::vector<AdamGroup>& groups, DeviceId device) {
    const dlpack::Described steps = dlpack::describe_on_any_device(from.steps, {"steps", 0});
    step.param_count = steps.numel;
    step.steps = device_array<int64_t>(from.steps, DType::kInt64, device, -1, "steps");
    step.factors = device_array<const double>(from.factors, DType::kFloat64, device, steps.numel, "factors");
    step.noop = device_array<const float>(from.noop, DType::kFloat32, device, 1, "noop");
    step.groups = groups;
    if (!from.used.is_none()) {
      const std::string_view used = from.used.cast<std::string_view>();  // the caller's argument holds the bytes
      step.used = {reinterpret_cast<const uint8_t*>(used.data()), used.size()};
    }
    if (!from.lr.is_none()) {
      for (py::handle one : from.lr) {
        lr.push_back(device_array<const float>(one, DType::kFloat32, device, 1, "lr"));
      }
      step.lr = lr;
    }
    step.average = from.average;
    from.options.fill(step);
  }
};

class PyAdamCudaTable : public PyAdamRows<AdamCudaTable> {
 public:
  explicit PyAdamCudaTable(int device) : PyAdamRows(CudaDevice::at(device).id(), CudaDevice::at(device)) {}

  void begin(const std::vector<AdamGroup>& groups, const AdamArguments& arguments) {
    const AdamCudaStepHolder holder(arguments, groups, device_);
    const StreamRef stream = current_stream(device_);
    py::gil_scoped_release unlocked;
    table_.begin(holder.step, *stream);
  }
  void step(int64_t first_row, int64_t last_row) {
    const StreamRef stream = current_stream(device_);
    py::gil_scoped_release unlocked;
    table_.step(first_row, last_row < 0 ? table_.rows() : last_row, *stream);
  }
};

// One step over lists of tensors on `device`, in the caller's current stream. Everything is checked before anything is
// enqueued. Entry i takes the steps and the factor i; its random bits are those of parameter param_ids[i], or i.
inline void adam_step_cuda(int device, const py::sequence& tensors, const AdamGroup& group,
                           const std::optional<std::vector<uint32_t>>& param_ids, const AdamArguments& arguments) {
  const AdamLists lists(tensors);
  const DeviceId id{DeviceId::Kind::kCuda, device};
  BW_EXPECTS(
      !param_ids || param_ids->size() == lists.count(),
      "param_ids has " + std::to_string(param_ids->size()) + " entries, params has " + std::to_string(lists.count()));
  std::vector<std::pair<AdamRow, uint32_t>> rows;  // with their places
  for (size_t i = 0; i < lists.count(); ++i) {
    const auto place = static_cast<uint32_t>(i);
    rows.emplace_back(lists.row(i, id, param_ids ? (*param_ids)[i] : place), place);
  }
  // Rows of one kernel variant next to each other: one launch for each.
  std::ranges::stable_sort(rows, {}, [](const auto& entry) {
    const AdamVariant variant = entry.first.variant();
    return std::tuple(variant.p_dtype, variant.state_dtype, variant.weight, variant.amsgrad);
  });
  AdamCudaStepHolder holder(arguments, {}, id);
  holder.step.groups = {&group, 1};
  const StreamRef stream = current_stream(id);
  py::gil_scoped_release unlocked;
  with_cuda_scratch<AdamCudaTable>(device, *stream, [&](AdamCudaTable& table) {
    table.clear();
    for (const auto& [row, place] : rows) {
      table.add(row, place);
    }
    table.begin(holder.step, *stream);
    table.step(0, table.rows(), *stream);
  });
}

inline void bind_adam_cuda(py::module_& m) {
  bind_adam_rows<PyAdamCudaTable>(m, "AdamCudaTable")
      .def(py::init<int>(), py::arg("device"))
      .def("begin", &PyAdamCudaTable::begin, py::arg("groups"), py::arg("arguments"))
      .def("step", &PyAdamCudaTable::step, py::arg("first_row") = 0, py::arg("last_row") = -1);
  m.def("adam_step_cuda", &adam_step_cuda, py::arg("device"), py::arg("tensors"), py::arg("group"),
        py::arg("param_ids").none(true), py::arg("arguments"));
}

}  // namespace bucketwheel
