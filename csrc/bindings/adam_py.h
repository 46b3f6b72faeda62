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

  void step(const std::vector<AdamGroup>& groups, py::handle steps, py::handle used, py::handle gscale,
            int64_t first_row, int64_t last_row, bool decoupled, bool maximize, bool stochastic, bool stochastic_param,
            uint64_t seed, py::handle noop) {
    AdamStep step;
    step.groups = groups;
    step.steps = span_of<int64_t>(steps, DType::kInt64, "steps");
    step.used = span_of<uint8_t>(used, DType::kUInt8, "used");
    step.gscale = span_of<double>(gscale, DType::kFloat64, "gscale");
    step.first_row = first_row;
    step.last_row = last_row < 0 ? table_.rows() : last_row;
    step.decoupled = decoupled;
    step.maximize = maximize;
    step.stochastic = stochastic;
    step.stochastic_param = stochastic_param;
    step.seed = seed;
    if (!noop.is_none()) {
      const std::span<const float> flag = span_of<float>(noop, DType::kFloat32, "noop");
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

// The lists of one call, by index; a list that is None stands for Nones.
class AdamLists {
 public:
  AdamLists(py::sequence params, py::sequence grads, py::sequence exp_avgs, py::sequence exp_avg_sqs,
            std::optional<py::sequence> max_exp_avg_sqs, std::optional<py::sequence> master_params,
            std::optional<py::sequence> remainders)
      : count_(py::len(params)),
        lists_{{{"params", std::move(params)},
                {"grads", std::move(grads)},
                {"exp_avgs", std::move(exp_avgs)},
                {"exp_avg_sqs", std::move(exp_avg_sqs)},
                {"max_exp_avg_sqs", std::move(max_exp_avg_sqs)},
                {"master_params", std::move(master_params)},
                {"remainders", std::move(remainders)}}} {
    for (const List& list : lists_) {
      if (list.tensors) {
        expect_count(*list.tensors, list.name);
      }
    }
  }

  size_t count() const { return count_; }
  void expect_count(const py::sequence& list, const char* name) const {
    BW_EXPECTS(py::len(list) == count_, std::string(name) + " has " + std::to_string(py::len(list)) +
                                            " tensors, params has " + std::to_string(count_));
  }

  // The tensors of one index, checked, as a row.
  AdamRow row(size_t i, DeviceId device, uint32_t param) const {
    const auto index = static_cast<int64_t>(i);
    py::object items[7];
    for (size_t k = 0; k < 7; ++k) {
      const std::optional<py::sequence>& tensors = lists_[k].tensors;
      items[k] = tensors ? py::object((*tensors)[i]) : py::none();
    }
    const auto& [p, g, m, v, vmax, master, remainder] = items;
    const AdamTensors tensors = AdamTensors::describe({p, m, v, vmax, master, remainder}, index);
    dlpack::expect_device(tensors.p, device, {"params", index});
    const dlpack::Described grad = tensors.grad(g, index);
    tensors.expect_disjoint(grad, index);
    AdamRow row = tensors.row(0, param, 0);
    row.g = grad.data;
    row.g_dtype = grad.dtype;
    return row;
  }

 private:
  struct List {
    const char* name;
    std::optional<py::sequence> tensors;
  };
  size_t count_;
  std::array<List, 7> lists_;
};

// One step over lists of tensors. Everything is checked before anything changes. `steps` is one int or a list; `step`
// comes with what is the same for every tensor.
inline void adam_step(const AdamLists& lists, const py::object& steps, const AdamGroup& group, double grad_scale,
                      const std::optional<std::vector<uint32_t>>& param_ids, bool noop, AdamStep step) {
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
    step.groups = {&group, 1};
    step.steps = numbers;
    step.gscale = {&grad_scale, 1};
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
  py::class_<PyAdamTable>(m, "AdamTable")
      .def(py::init<>())
      .def("add", &PyAdamTable::add, py::arg("p"), py::arg("g").none(true), py::arg("m"), py::arg("v"),
           py::arg("master").none(true), py::arg("group"), py::kw_only(), py::arg("max_exp_avg_sq") = py::none(),
           py::arg("remainder") = py::none(), py::arg("param") = 0, py::arg("param_begin") = 0)
      .def("set_grads", &PyAdamTable::set_grads, py::arg("grads"), py::arg("first_row") = 0)
      .def("clear_grads", &PyAdamTable::clear_grads)
      .def("step", &PyAdamTable::step, py::arg("groups"), py::arg("steps"), py::arg("used") = py::none(),
           py::arg("gscale") = py::none(), py::arg("first_row") = 0, py::arg("last_row") = -1,
           py::arg("decoupled") = true, py::arg("maximize") = false, py::arg("stochastic") = true,
           py::arg("stochastic_param") = false, py::arg("seed") = 0, py::arg("noop") = py::none())
      .def_property_readonly("rows", &PyAdamTable::rows)
      .def_property_readonly("numel", &PyAdamTable::numel);
  m.def("adam_step", [](py::sequence params, py::sequence grads, py::sequence exp_avgs, py::sequence exp_avg_sqs,
                        std::optional<py::sequence> max_exp_avg_sqs, std::optional<py::sequence> master_params,
                        std::optional<py::sequence> remainders, const py::object& steps, double lr, double beta1,
                        double beta2, double eps, double weight_decay, double grad_scale, bool noop,
                        const std::optional<std::vector<uint32_t>>& param_ids, bool decoupled, bool maximize,
                        bool stochastic, bool stochastic_param, uint64_t seed) {
    AdamStep step;
    step.decoupled = decoupled;
    step.maximize = maximize;
    step.stochastic = stochastic;
    step.stochastic_param = stochastic_param;
    step.seed = seed;
    adam_step({std::move(params), std::move(grads), std::move(exp_avgs), std::move(exp_avg_sqs),
               std::move(max_exp_avg_sqs), std::move(master_params), std::move(remainders)},
              steps, {lr, beta1, beta2, eps, weight_decay}, grad_scale, param_ids, noop, step);
  });  // by position: names take longer than a small step
}

}  // namespace bucketwheel
