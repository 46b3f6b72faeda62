// Bindings of kernels/adam.h: the table that the optimizer keeps, and the one-call step over tensor lists.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "bindings/adam_rows.h"
#include "bindings/adam_tensors.h"
#include "bindings/dlpack.h"
#include "bindings/layout.h"
#include "kernels/adam.h"

namespace bucketwheel {

namespace py = pybind11;

// A contiguous CPU tensor of plain values, borrowed for one call.
template <class T>
std::span<const T> span_of(py::handle tensor, DType dtype, const char* what) {
  if (tensor.is_none()) {
    return {};
  }
  const dlpack::Described values = dlpack::describe(tensor);
  if (values.dtype != dtype) {
    throw TypeError(std::string(what) + " is " + name_of(values.dtype) + ", expected " + name_of(dtype));
  }
  BW_EXPECTS(values.device.kind == DeviceId::Kind::kCpu && values.is_contiguous(),
             std::string(what) + " must be a contiguous cpu tensor");
  return {static_cast<const T*>(values.data), static_cast<size_t>(values.numel)};
}

class PyAdamTable : public PyAdamRows<AdamTable> {
 public:
  PyAdamTable() : PyAdamRows(DeviceId{}) {}

  void step(const std::vector<AdamGroup>& groups, const AdamArguments& arguments, int64_t first_row, int64_t last_row) {
    AdamStep step;
    arguments.fill(step);
    step.groups = groups;
    step.steps = span_of<int64_t>(arguments.steps, DType::kInt64, "steps");
    step.used = span_of<uint8_t>(arguments.used, DType::kUInt8, "used");
    step.gscale = span_of<double>(arguments.factors, DType::kFloat64, "factors");
    BW_EXPECTS(step.gscale.empty() || arguments.average == 1.0, "average is part of the factors of rows");
    if (step.gscale.empty()) {
      step.gscale = {&arguments.average, 1};
    }
    step.first_row = first_row;
    step.last_row = last_row < 0 ? table_.rows() : last_row;
    if (!arguments.noop.is_none()) {
      const std::span<const float> flag = span_of<float>(arguments.noop, DType::kFloat32, "noop");
      BW_EXPECTS(flag.size() == 1, "noop has " + std::to_string(flag.size()) + " elements, expected one");
      step.noop = flag.data();
    }
    py::gil_scoped_release unlocked;
    table_.step(step);
  }
};

// A step count: an int (the step being taken) or a 0-d tensor (the steps taken so far, advanced by one afterwards).
class StepCount {
 public:
  StepCount(py::handle value, int64_t index) {
    if (py::isinstance<py::int_>(value)) {
      step_ = value.cast<int64_t>();
      BW_EXPECTS(step_ >= 1,
                 dlpack::item_text("steps", index) + " is " + std::to_string(step_) + ": steps count from 1");
      return;
    }
    tensor_ = dlpack::describe_item(value, {"steps", index});
    BW_EXPECTS(tensor_.numel == 1,
               dlpack::item_text("steps", index) + " has shape " + tensor_.shape_text() + ", expected one element");
    if (tensor_.dtype == DType::kFloat32) {
      step_ = static_cast<int64_t>(*static_cast<const float*>(tensor_.data)) + 1;
    } else if (tensor_.dtype == DType::kInt64) {
      step_ = *static_cast<const int64_t*>(tensor_.data) + 1;
    } else {
      throw TypeError(dlpack::item_text("steps", index) + " is " + name_of(tensor_.dtype) +
                      ", expected float32 or int64");
    }
    BW_EXPECTS(step_ >= 1, dlpack::item_text("steps", index) + " is negative");
  }
  int64_t value() const { return step_; }
  const void* address() const { return tensor_.data; }
  void store() const {
    if (tensor_.data == nullptr) {
      return;
    }
    if (tensor_.dtype == DType::kFloat32) {
      *static_cast<float*>(tensor_.data) = static_cast<float>(step_);
    } else {
      *static_cast<int64_t*>(tensor_.data) = step_;
    }
  }

 private:
  int64_t step_;
  dlpack::Described tensor_;
};

// One step over lists of tensors. Everything is checked before anything changes.
inline void adam_step(const py::sequence& tensors, const AdamGroup& group,
                      const std::optional<std::vector<uint32_t>>& param_ids, bool noop,
                      const AdamArguments& arguments) {
  const AdamLists lists(tensors);
  const py::object& steps = arguments.steps;
  const size_t count = lists.count();
  const bool one_step = py::isinstance<py::int_>(steps);
  const py::sequence step_list = one_step ? py::sequence(py::list()) : steps.cast<py::sequence>();
  if (!one_step) {
    lists.expect_count(step_list, "steps");
  }
  BW_EXPECTS(!param_ids || param_ids->size() == count,
             "param_ids has " + std::to_string(param_ids->size()) + " entries, params has " + std::to_string(count));
  AdamTable table;
  std::vector<StepCount> counts;
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < count; ++i) {
    table.add(lists.row(i, DeviceId{}, param_ids ? (*param_ids)[i] : static_cast<uint32_t>(i)));
    counts.emplace_back(one_step ? py::handle(steps) : py::handle(py::object(step_list[i])), static_cast<int64_t>(i));
    numbers.push_back(counts.back().value());
  }
  if (noop) {
    return;
  }
  {
    py::gil_scoped_release unlocked;
    AdamStep step;
    arguments.fill(step);
    step.groups = {&group, 1};
    step.steps = numbers;
    step.gscale = {&arguments.average, 1};
    step.last_row = table.rows();
    table.step(step);
  }
  for (const StepCount& count_of_one : counts) {
    count_of_one.store();
  }
}

inline void bind_adam(py::module_& m) {
  m.def("set_num_threads", &set_num_threads, py::arg("threads"));
  m.def(
      "use_torch_threads",
      [](int threads) {
        set_num_threads(threads);
        use_openmp_team();
      },
      py::arg("threads"));  // torch.get_num_threads(), from a thread that computes with torch
  py::class_<AdamGroup>(m, "AdamGroup")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay) {
             return AdamGroup{lr, beta1, beta2, eps, weight_decay};
           }),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"))
      .def_readwrite("lr", &AdamGroup::lr)
      .def_readwrite("beta1", &AdamGroup::beta1)
      .def_readwrite("beta2", &AdamGroup::beta2)
      .def_readwrite("eps", &AdamGroup::eps)
      .def_readwrite("weight_decay", &AdamGroup::weight_decay);
  py::class_<AdamFlags>(m, "AdamFlags")
      .def(py::init([](bool decoupled, bool maximize, bool stochastic, bool stochastic_param) {
             return AdamFlags{decoupled, maximize, stochastic, stochastic_param};
           }),
           py::arg("decoupled") = true, py::arg("maximize") = false, py::arg("stochastic") = true,
           py::arg("stochastic_param") = false);
  py::class_<AdamArguments>(m, "AdamArguments")
      .def(py::init([](py::object steps, double average, uint64_t seed, const AdamFlags& flags, py::object used,
                       py::object factors, py::object noop, py::object lr) {
             return AdamArguments{std::move(steps),   average,         seed,         flags, std::move(used),
                                  std::move(factors), std::move(noop), std::move(lr)};
           }),
           py::arg("steps"), py::arg("average") = 1.0, py::arg("seed") = 0, py::arg("flags") = AdamFlags(),
           py::kw_only(), py::arg("used") = py::none(), py::arg("factors") = py::none(), py::arg("noop") = py::none(),
           py::arg("lr") = py::none());
  bind_adam_rows<PyAdamTable>(m, "AdamTable")
      .def(py::init<>())
      .def("step", &PyAdamTable::step, py::arg("groups"), py::arg("arguments"), py::arg("first_row") = 0,
           py::arg("last_row") = -1);
  m.def("adam_step", &adam_step, py::arg("tensors"), py::arg("group"), py::arg("param_ids").none(true), py::arg("noop"),
        py::arg("arguments"));
}

}  // namespace bucketwheel
