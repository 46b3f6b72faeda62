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

class PyAdamTable {
 public:
  int64_t add(py::handle p, py::object g, py::handle m, py::handle v, py::handle master, int32_t group, py::handle vmax,
              py::handle remainder, uint32_t param, int64_t param_begin) {
    const int64_t index = table_.rows();
    AdamTensors tensors = AdamTensors::describe({p, m, v, vmax, master, remainder}, index);
    tensors.expect_cpu(index);
    std::optional<dlpack::Described> grad = described_grad(tensors, g, index);
    Owners owners;
    for (py::handle tensor : {p, m, v, vmax, master, remainder}) {
      if (!tensor.is_none()) {
        owners.push_back(dlpack::hold(tensor).owner);
      }
    }
    table_.add(tensors.row(group, param, param_begin));
    tensors_.push_back(std::move(tensors));
    owners_.push_back(std::move(owners));
    grads_.push_back(py::none());
    put_grad(index, grad, std::move(g));
    return index;
  }

  // All or nothing: every tensor is checked before the first is taken.
  void set_grads(const py::sequence& grads, int64_t first_row) {
    const auto count = static_cast<int64_t>(py::len(grads));
    BW_EXPECTS(first_row >= 0 && first_row + count <= table_.rows(),
               std::to_string(count) + " grads from row " + std::to_string(first_row) + " for a table of " +
                   std::to_string(table_.rows()) + " rows");
    std::vector<std::pair<py::object, std::optional<dlpack::Described>>> checked;
    checked.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      py::object g = grads[static_cast<size_t>(i)];
      std::optional<dlpack::Described> grad =
          described_grad(tensors_[static_cast<size_t>(first_row + i)], g, first_row + i);
      checked.emplace_back(std::move(g), std::move(grad));
    }
    for (int64_t i = 0; i < count; ++i) {
      auto& [g, grad] = checked[static_cast<size_t>(i)];
      put_grad(first_row + i, grad, std::move(g));
    }
  }

  // Lets go of the gradients; set_grads() must come before the next step.
  void clear_grads() {
    for (int64_t row = 0; row < table_.rows(); ++row) {
      put_grad(row, std::nullopt, py::none());
    }
  }

  void step(const std::vector<AdamGroup>& groups, py::handle steps, py::handle used, py::handle gscale,
            int64_t first_row, int64_t last_row, bool decoupled, bool maximize, py::handle noop, bool stochastic,
            bool stochastic_param, uint64_t seed) {
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

  int64_t rows() const { return table_.rows(); }
  int64_t numel() const { return table_.numel(); }

 private:
  using Owners = std::vector<std::shared_ptr<void>>;

  static std::optional<dlpack::Described> described_grad(const AdamTensors& tensors, py::handle g, int64_t index) {
    if (g.is_none()) {
      return std::nullopt;
    }
    dlpack::Described grad = tensors.grad(g, index);
    tensors.expect_disjoint(grad, index);
    return grad;
  }
  void put_grad(int64_t row, const std::optional<dlpack::Described>& grad, py::object g) {
    table_.set_grad(row, grad ? grad->data : nullptr, grad ? grad->dtype : DType::kFloat32);
    grads_[static_cast<size_t>(row)] = std::move(g);
  }

  AdamTable table_;
  std::vector<AdamTensors> tensors_;
  std::vector<Owners> owners_;
  std::vector<py::object> grads_;
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

  // Checks the tensors of one index and adds them as a row.
  void add_to(AdamTable& table, size_t i, uint32_t param) const {
    const auto index = static_cast<int64_t>(i);
    py::object items[7];
    for (size_t k = 0; k < 7; ++k) {
      items[k] = lists_[k].tensors ? py::object((*lists_[k].tensors)[i]) : py::none();
    }
    const auto& [p, g, m, v, vmax, master, remainder] = items;
    const AdamTensors tensors = AdamTensors::describe({p, m, v, vmax, master, remainder}, index);
    tensors.expect_cpu(index);
    const dlpack::Described grad = tensors.grad(g, index);
    tensors.expect_disjoint(grad, index);
    table.set_grad(table.add(tensors.row(0, param, 0)), grad.data, grad.dtype);
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
    lists.add_to(table, i, param_ids ? (*param_ids)[i] : static_cast<uint32_t>(i));
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
  m.def("num_threads", &num_threads);
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
           py::arg("gscale") = py::none(), py::arg("first_row") = 0, py::arg("last_row") = -1, py::kw_only(),
           py::arg("decoupled") = true, py::arg("maximize") = false, py::arg("noop") = py::none(),
           py::arg("stochastic") = true, py::arg("stochastic_param") = false, py::arg("seed") = 0)
      .def_property_readonly("rows", &PyAdamTable::rows)
      .def_property_readonly("numel", &PyAdamTable::numel);
  m.def(
      "adam_step",
      [](py::sequence params, py::sequence grads, py::sequence exp_avgs, py::sequence exp_avg_sqs,
         std::optional<py::sequence> max_exp_avg_sqs, std::optional<py::sequence> master_params,
         std::optional<py::sequence> remainders, const py::object& steps, const AdamGroup& group, double grad_scale,
         bool decoupled, bool maximize, bool noop, bool stochastic, bool stochastic_param, uint64_t seed,
         const std::optional<std::vector<uint32_t>>& param_ids) {
        AdamStep step;
        step.decoupled = decoupled;
        step.maximize = maximize;
        step.stochastic = stochastic;
        step.stochastic_param = stochastic_param;
        step.seed = seed;
        adam_step({std::move(params), std::move(grads), std::move(exp_avgs), std::move(exp_avg_sqs),
                   std::move(max_exp_avg_sqs), std::move(master_params), std::move(remainders)},
                  steps, group, grad_scale, param_ids, noop, step);
      },
      py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
      py::arg("max_exp_avg_sqs").none(true), py::arg("master_params").none(true), py::arg("remainders").none(true),
      py::arg("steps"), py::arg("group"), py::kw_only(), py::arg("grad_scale"), py::arg("decoupled"),
      py::arg("maximize"), py::arg("noop"), py::arg("stochastic"), py::arg("stochastic_param"), py::arg("seed"),
      py::arg("param_ids").none(true));
}

}  // namespace bucketwheel
