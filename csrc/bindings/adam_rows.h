// Bindings of Adam: what those of every device share. The arguments of a step, lists of tensors, and tables of rows.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/adam_tensors.h"
#include "bindings/dlpack.h"

namespace bucketwheel {

namespace py = pybind11;

struct AdamFlags {
  bool decoupled = true;
  bool maximize = false;
  bool stochastic = true;
  bool stochastic_param = false;
};

// What a step gets beside its rows and groups. On the CPU arrays are host tensors by row; on CUDA they lie on the device,
// by parameter.
struct AdamArguments {
  py::object steps;      // int64; of adam_step() on the CPU an int or a list
  double average = 1.0;  // factor of every gradient
  uint64_t seed = 0;
  AdamFlags flags;
  py::object used;     // uint8; on CUDA bytes. None: all
  py::object factors;  // float64; None: 1. On the CPU they stand for `average`, which is 1 then
  py::object noop;     // float32 [1]; None
  py::object lr;       // CUDA: a list of None or float32 [1] on the device, one for each group; None

  template <class Step>
  void fill(Step& step) const {
    step.decoupled = flags.decoupled;
    step.maximize = flags.maximize;
    step.stochastic = flags.stochastic;
    step.stochastic_param = flags.stochastic_param;
    step.seed = seed;
  }
};

// The lists of one call: params, grads and so on, by index. A list that is None stands for Nones.
class AdamLists {
 public:
  explicit AdamLists(const py::sequence& lists) {
    BW_EXPECTS(py::len(lists) == kLists, std::to_string(py::len(lists)) + " lists of tensors, expected 7");
    for (size_t k = 0; k < kLists; ++k) {
      const py::object list = lists[k];
      if (!list.is_none()) {
        lists_[k] = list.cast<py::sequence>();
        expect_count(*lists_[k], kNames[k]);
      }
    }
  }

  size_t count() const { return py::len(*lists_[0]); }
  void expect_count(const py::sequence& list, const char* name) const {
    BW_EXPECTS(py::len(list) == count(), std::string(name) + " has " + std::to_string(py::len(list)) +
                                             " tensors, params has " + std::to_string(count()));
  }

  // The tensors of one index, checked, as a row.
  AdamRow row(size_t i, DeviceId device, uint32_t param) const {
    const auto index = static_cast<int64_t>(i);
    py::object items[kLists];
    for (size_t k = 0; k < kLists; ++k) {
      items[k] = lists_[k] ? py::object((*lists_[k])[i]) : py::none();
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
  static constexpr size_t kLists = 7;
  static constexpr const char* kNames[kLists] = {"params",          "grads",         "exp_avgs",  "exp_avg_sqs",
                                                 "max_exp_avg_sqs", "master_params", "remainders"};
  std::optional<py::sequence> lists_[kLists];
};

// A Table (AdamTable, AdamCudaTable) with the tensors of its rows, which it keeps alive.
template <class Table>
class PyAdamRows {
 public:
  template <class... Args>
  explicit PyAdamRows(DeviceId device, Args&&... args) : table_(std::forward<Args>(args)...), device_(device) {}

  int64_t add(py::handle p, py::object g, py::handle m, py::handle v, py::handle master, int32_t group, py::handle vmax,
              py::handle remainder, uint32_t param, int64_t param_begin) {
    const int64_t index = table_.rows();
    AdamTensors tensors = AdamTensors::describe({p, m, v, vmax, master, remainder}, index);
    dlpack::expect_device(tensors.p, device_, {"params", index});
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

  int64_t rows() const { return table_.rows(); }
  int64_t numel() const { return table_.numel(); }

 protected:
  Table table_;
  const DeviceId device_;

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
    const auto index = static_cast<size_t>(row);
    table_.set_grad(row, grad ? grad->data : nullptr, grad ? grad->dtype : tensors_[index].default_grad_dtype());
    grads_[index] = std::move(g);
  }

  std::vector<AdamTensors> tensors_;
  std::vector<Owners> owners_;
  std::vector<py::object> grads_;
};

// What tables of every device have.
template <class Table>
py::class_<Table> bind_adam_rows(py::module_& m, const char* name) {
  return py::class_<Table>(m, name)
      .def("add", &Table::add, py::arg("p"), py::arg("g").none(true), py::arg("m"), py::arg("v"),
           py::arg("master").none(true), py::arg("group"), py::kw_only(), py::arg("max_exp_avg_sq") = py::none(),
           py::arg("remainder") = py::none(), py::arg("param") = 0, py::arg("param_begin") = 0)
      .def("set_grads", &Table::set_grads, py::arg("grads"), py::arg("first_row") = 0)
      .def("clear_grads", &Table::clear_grads)
      .def_property_readonly("rows", &Table::rows)
      .def_property_readonly("numel", &Table::numel);
}

}  // namespace bucketwheel
