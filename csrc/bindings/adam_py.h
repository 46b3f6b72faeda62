// Bindings of kernels/adam.h, and what those of CUDA share: the arguments of a step, lists of tensors, tables of rows.
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
#include "bindings/dlpack.h"
#include "kernels/adam.h"
#include "kernels/adam_variant.h"

namespace bucketwheel {

namespace py = pybind11;

// The tensors of one row, on whatever device: checked against each other, nothing owned.
struct AdamTensors {
  // The Python objects; vmax, master and remainder may be None.
  struct Objects {
    py::handle p, m, v, vmax, master, remainder;
  };

  dlpack::Described p, m, v;
  std::optional<dlpack::Described> vmax, master, remainder;

  static AdamTensors describe(const Objects& objects, int64_t index) {
    using namespace dlpack;
    AdamTensors out{describe_on_any_device(objects.p, {"params", index}),
                    describe_on_any_device(objects.m, {"exp_avgs", index}),
                    describe_on_any_device(objects.v, {"exp_avg_sqs", index}),
                    optional(objects.vmax, {"max_exp_avg_sqs", index}),
                    optional(objects.master, {"master_params", index}),
                    optional(objects.remainder, {"remainders", index})};
    expect_float(out.p, {"params", index});
    expect_dense(out.p, {"params", index});
    out.expect_states(index);
    out.expect_weight(index);
    for (const Part& part : out.parts(nullptr)) {
      if (part.tensor != nullptr) {
        expect_same_device(*part.tensor, {part.list, index}, out.p, {"params", index});
        expect_same_layout(*part.tensor, {part.list, index}, out.p, {"params", index});
      }
    }
    return out;
  }

  AdamRow row(int32_t group, uint32_t param, int64_t param_begin) const {
    AdamRow out;
    out.p = p.data;
    out.m = m.data;
    out.v = v.data;
    out.vmax = vmax ? vmax->data : nullptr;
    out.master = master ? master->data : remainder ? remainder->data : nullptr;
    out.numel = p.numel;
    out.param_begin = param_begin;
    out.param = param;
    out.group = group;
    out.p_dtype = p.dtype;
    out.g_dtype = default_grad_dtype();
    out.state_dtype = m.dtype;
    out.weight = master ? AdamWeight::kMaster : remainder ? AdamWeight::kRemainder : AdamWeight::kParam;
    return out;
  }

  // Of a row that has no gradient yet.
  DType default_grad_dtype() const { return p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

  dlpack::Described grad(py::handle g, int64_t index) const {
    using namespace dlpack;
    Described out = describe_on_any_device(g, {"grads", index});
    if (p.dtype == DType::kFloat64) {
      expect_dtype(out, DType::kFloat64, {"grads", index});
    } else if (!is_float(out.dtype) || out.dtype == DType::kFloat64) {
      throw TypeError(Name{"grads", index}.text() + " is " + name_of(out.dtype) +
                      ", expected float32, bfloat16 or float16");
    }
    expect_same_device(out, {"grads", index}, p, {"params", index});
    expect_same_layout(out, {"grads", index}, p, {"params", index});
    // In-place kernels on overlapping memory would give results that depend on the instruction set.
    const auto all = parts(&out);
    for (auto a = all.begin(); p.numel > 0 && a != all.end(); ++a) {
      for (auto b = a + 1; a->tensor != nullptr && b != all.end(); ++b) {
        BW_EXPECTS(
            b->tensor == nullptr || !dlpack::overlap(*a->tensor, *b->tensor),
            dlpack::Name{a->list, index}.text() + " and " + dlpack::Name{b->list, index}.text() + " share memory");
      }
    }
    return out;
  }

 private:
  struct Part {
    const char* list;
    const dlpack::Described* tensor;
  };
  std::array<Part, 7> parts(const dlpack::Described* g) const {
    const auto pointer = [](const std::optional<dlpack::Described>& x) { return x ? &*x : nullptr; };
    return {{{"params", &p},
             {"grads", g},
             {"exp_avgs", &m},
             {"exp_avg_sqs", &v},
             {"max_exp_avg_sqs", pointer(vmax)},
             {"master_params", pointer(master)},
             {"remainders", pointer(remainder)}}};
  }

  static std::optional<dlpack::Described> optional(py::handle object, dlpack::Name name) {
    return object.is_none() ? std::nullopt : std::optional(dlpack::describe_on_any_device(object, name));
  }

  void expect_states(int64_t index) const {
    using namespace dlpack;
    if (p.dtype == DType::kFloat64) {
      expect_dtype(m, DType::kFloat64, {"exp_avgs", index});
    } else if (m.dtype != DType::kFloat32 && m.dtype != DType::kBFloat16) {
      throw TypeError(Name{"exp_avgs", index}.text() + " is " + name_of(m.dtype) + ", expected float32 or bfloat16");
    }
    expect_dtype(v, m.dtype, {"exp_avg_sqs", index});
    if (vmax) {
      expect_dtype(*vmax, m.dtype, {"max_exp_avg_sqs", index});
    }
  }

  void expect_weight(int64_t index) const {
    using namespace dlpack;
    const auto expect_taken = [&](bool is_taken, const char* list) {
      if (!is_taken) {
        throw TypeError(Name{"params", index}.text() + " is " + name_of(p.dtype) + " and takes no " + list);
      }
    };
    if (master) {
      expect_dtype(*master, DType::kFloat32, {"master_params", index});
      expect_taken(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, "master_params");
    }
    if (remainder) {
      expect_dtype(*remainder, DType::kInt16, {"remainders", index});
      expect_taken(p.dtype == DType::kBFloat16, "remainders");
      BW_EXPECTS(!master, Name{"params", index}.text() + " has both master_params and remainders");
    }
  }
};

// What is the same for every tensor of a step.
struct AdamOptions {
  bool decoupled = true;
  bool maximize = false;
  bool stochastic = true;
  uint64_t seed = 0;
  bool noop = false;  // of adam_step() on the CPU: all is checked, and nothing changes
  bool resync = false;

  template <class Step>
  void fill(Step& step) const {
    step.decoupled = decoupled;
    step.maximize = maximize;
    step.stochastic = stochastic;
    step.seed = seed;
    step.resync = resync;
  }
};

// What a step gets beside its rows and groups. On the CPU arrays are host tensors by row; on CUDA they lie on the device,
// by parameter.
struct AdamArguments {
  py::object steps;      // int64; of adam_step() on the CPU an int or a list
  double average = 1.0;  // factor of every gradient
  AdamOptions options;
  py::object used;     // uint8; on CUDA bytes. None: all
  py::object factors;  // float64; None: 1. On the CPU they stand for `average`, which is 1 then
  py::object noop;     // float32 [1]; None
  py::object lr;       // CUDA: a list of None or float32 [1] on the device, one for each group; None
};

// The lists of one call: params, grads and so on, by index. A list that is None stands for Nones.
class AdamLists {
 public:
  explicit AdamLists(const py::sequence& lists) {
    BW_EXPECTS(py::len(lists) == kLists, std::to_string(py::len(lists)) + " lists of tensors, expected 7");
    count_ = py::len(dlpack::sequence_of(lists[0], kNames[0]));
    for (size_t k = 0; k < kLists; ++k) {
      const py::object list = lists[k];
      if (!list.is_none()) {
        lists_[k] = dlpack::sequence_of(list, kNames[k]);
        expect_count(*lists_[k], kNames[k]);
      }
    }
  }

  size_t count() const { return count_; }
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
    AdamRow row = tensors.row(0, param, 0);
    row.g = grad.data;
    row.g_dtype = grad.dtype;
    return row;
  }

 private:
  static constexpr size_t kLists = 7;
  static constexpr const char* kNames[kLists] = {"params",          "grads",         "exp_avgs",  "exp_avg_sqs",
                                                 "max_exp_avg_sqs", "master_params", "remainders"};
  size_t count_ = 0;
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
        owners.push_back(dlpack::hold(tensor));
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
    return g.is_none() ? std::nullopt : std::optional(tensors.grad(g, index));
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

// A contiguous CPU tensor of plain values, borrowed for one call.
template <class T>
std::span<const T> span_of(py::handle tensor, DType dtype, const char* what) {
  if (tensor.is_none()) {
    return {};
  }
  const dlpack::Described values = dlpack::describe(tensor);
  dlpack::expect_dtype(values, dtype, {what});
  BW_EXPECTS(values.device.kind == DeviceId::Kind::kCpu && values.is_contiguous(),
             std::string(what) + " must be a contiguous cpu tensor");
  return {static_cast<const T*>(values.data), static_cast<size_t>(values.numel)};
}

class PyAdamTable : public PyAdamRows<AdamTable> {
 public:
  PyAdamTable() : PyAdamRows(DeviceId{}) {}

  void step(const std::vector<AdamGroup>& groups, const AdamArguments& arguments, int64_t first_row, int64_t last_row) {
    AdamStep step;
    arguments.options.fill(step);
    step.groups = groups;
    step.steps = span_of<int64_t>(arguments.steps, DType::kInt64, "steps");
    step.used = span_of<uint8_t>(arguments.used, DType::kUInt8, "used");
    step.gscale = span_of<double>(arguments.factors, DType::kFloat64, "factors");
    BW_EXPECTS(step.gscale.empty() || arguments.average == 1.0, "average must be 1 where rows have factors");
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
                 dlpack::Name{"steps", index}.text() + " is " + std::to_string(step_) + ": steps count from 1");
      return;
    }
    tensor_ = dlpack::describe_item(value, {"steps", index});
    BW_EXPECTS(tensor_.numel == 1,
               dlpack::Name{"steps", index}.text() + " has shape " + tensor_.shape_text() + ", expected one element");
    if (tensor_.dtype == DType::kFloat32) {
      step_ = static_cast<int64_t>(*static_cast<const float*>(tensor_.data)) + 1;
    } else if (tensor_.dtype == DType::kInt64) {
      step_ = *static_cast<const int64_t*>(tensor_.data) + 1;
    } else {
      throw TypeError(dlpack::Name{"steps", index}.text() + " is " + name_of(tensor_.dtype) +
                      ", expected float32 or int64");
    }
    BW_EXPECTS(step_ >= 1, dlpack::Name{"steps", index}.text() + " is negative");
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
inline void adam_step(const py::sequence& tensors, const py::object& steps, const AdamGroup& group, double average,
                      const std::optional<std::vector<uint32_t>>& param_ids, const AdamOptions& options) {
  const AdamLists lists(tensors);
  const size_t count = lists.count();
  const bool one_step = py::isinstance<py::int_>(steps);
  const py::sequence step_list =
      one_step ? py::sequence(py::list()) : dlpack::sequence_of(steps, "steps", "ints or tensors");
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
  if (options.noop) {
    return;
  }
  {
    py::gil_scoped_release unlocked;
    AdamStep step;
    options.fill(step);
    step.groups = {&group, 1};
    step.steps = numbers;
    step.gscale = {&average, 1};
    step.last_row = table.rows();
    table.step(step);
  }
  for (const StepCount& count_of_one : counts) {
    count_of_one.store();
  }
}

inline void bind_adam(py::module_& m) {
  m.def("use_torch_threads", &set_num_threads, py::arg("threads"));  // torch.get_num_threads()
  py::class_<AdamGroup>(m, "AdamGroup")
      .def(py::init<double, double, double, double, double>(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"));
  py::class_<AdamOptions>(m, "AdamOptions")
      .def(py::init<bool, bool, bool, uint64_t, bool, bool>(), py::arg("decoupled") = true, py::arg("maximize") = false,
           py::arg("stochastic") = true, py::arg("seed") = 0, py::arg("noop") = false, py::arg("resync") = false);
  py::class_<AdamArguments>(m, "AdamArguments")
      .def(py::init<py::object, double, AdamOptions, py::object, py::object, py::object, py::object>(),
           py::arg("steps"), py::arg("average") = 1.0, py::arg_v("options", AdamOptions(), "..."), py::kw_only(),
           py::arg("used") = py::none(), py::arg("factors") = py::none(), py::arg("noop") = py::none(),
           py::arg("lr") = py::none());
  bind_adam_rows<PyAdamTable>(m, "AdamTable")
      .def(py::init<>())
      .def("step", &PyAdamTable::step, py::arg("groups"), py::arg("arguments"), py::arg("first_row") = 0,
           py::arg("last_row") = -1);
  m.def("adam_step", &adam_step, py::arg("tensors"), py::arg("steps"), py::arg("group"), py::arg("average"),
        py::arg("param_ids").none(true), py::arg("options"));
}

}  // namespace bucketwheel
