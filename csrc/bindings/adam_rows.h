// Bindings of the tables of Adam rows: what those of every device share.
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

}  // namespace bucketwheel
