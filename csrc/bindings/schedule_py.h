// Bindings of plan/schedule.h. Flags and notes are bytes, one for each parameter; factors are doubles, as bytes.
//
// Arrivals: the post-accumulate hooks of one optimizer's parameters, on the CPU.
//
// [Note: quick arrival] Nearly every gradient is the first of its parameter in a window, in time, and of a shape and
// dtype that need no thought. It is copied into its bucket here, without a line of Python, and the placeholder put into
// p.grad. Everything else goes to Python (grads/window.py): the first gradient of a window or of a bucket, late and repeated
// ones, what was scaled or kept aside, very large ones (the copy should not keep the GIL), and whatever is not a plain
// dense tensor on the CPU. The GIL is the lock: between looking at the schedule and telling it there is no call that
// gives the GIL away.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/dlpack.h"
#include "kernels/pack.h"
#include "plan/schedule.h"

namespace bucketwheel {

namespace py = pybind11;

template <typename T>
py::bytes bytes_of(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

inline Flags flags_of(std::string_view bytes) { return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}; }

inline std::vector<double> factors_of(std::string_view bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

inline void bind_verdict(py::module_& m) {
  py::class_<StoreAction>(m, "Store")
      .def_readonly("param", &StoreAction::param)
      .def_readonly("bucket", &StoreAction::bucket)
      .def_readonly("late", &StoreAction::late)
      .def_readonly("add", &StoreAction::add);
  py::class_<LaunchAction>(m, "Launch")
      .def_readonly("bucket", &LaunchAction::bucket)
      .def_readonly("absent", &LaunchAction::absent)
      .def_readonly("late", &LaunchAction::late);
  py::class_<WindowVerdict>(m, "WindowVerdict")
      .def_readonly("is_dirty", &WindowVerdict::is_dirty)
      .def_readonly("is_complete", &WindowVerdict::is_complete)
      .def_readonly("is_uneven", &WindowVerdict::is_uneven)
      .def_property_readonly("held", [](const WindowVerdict& self) { return bytes_of(self.held); })
      .def_readonly("void", &WindowVerdict::voided)
      .def_readonly("late", &WindowVerdict::late)
      .def_readonly("conflicts", &WindowVerdict::conflicts)
      .def_readonly("scaled_apart", &WindowVerdict::scaled_apart)
      .def_property_readonly("factors", [](const WindowVerdict& self) { return bytes_of(self.factors); });
}

inline void bind_schedule(py::module_& m) {
  bind_verdict(m);
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def(py::init<std::vector<std::vector<int>>, int, bool>(), py::arg("buckets_of"), py::arg("bucket_count"),
           py::arg("is_static") = false)
      .def(
          "gradient",
          [](Schedule& self, int param, bool replaces, bool launch) {
            Actions actions = self.gradient(param, replaces, launch);
            return py::make_tuple(std::move(actions.stores), std::move(actions.launches));
          },
          py::arg("param"), py::arg("replaces") = false, py::arg("launch") = true)
      .def("ready", &Schedule::ready)
      .def(
          "complete", [](Schedule& self, const std::vector<int>& params) { return self.complete(params); },
          py::arg("params"))
      .def("flush", &Schedule::flush)
      .def("discard", &Schedule::discard)
      .def("forget_window", &Schedule::forget_window)
      .def(
          "drops", [](const Schedule& self, std::string_view held) { return self.drops(flags_of(held)); },
          py::arg("held"))
      .def("has_stored", &Schedule::has_stored, py::arg("param"))
      .def_property_readonly("is_dirty", &Schedule::is_dirty)
      .def_property_readonly("window", &Schedule::window)
      .def(
          "notes",
          [](const Schedule& self, std::string_view held, std::string_view older, std::string_view factors) {
            return bytes_of(self.notes(flags_of(held), flags_of(older), factors_of(factors)));
          },
          py::arg("held"), py::arg("older") = "", py::arg("factors") = "")
      .def(
          "agree", [](const Schedule& self, const std::vector<std::string_view>& notes) { return self.agree(notes); },
          py::arg("notes"))
      .def(
          "close",
          [](Schedule& self, const WindowVerdict& verdict) {
            std::vector<LaunchAction> first, late;
            self.close(verdict, &first, &late);
            return py::make_tuple(std::move(first), std::move(late));
          },
          py::arg("verdict"))
      .def_property_readonly("is_learnt", &Schedule::is_learnt)
      .def("is_private", &Schedule::is_private, py::arg("param"))
      .def(
          "assume",
          [](const Schedule& self, std::string_view held, std::string_view older, std::string_view factors) {
            return self.assume(flags_of(held), flags_of(older), factors_of(factors));
          },
          py::arg("held"), py::arg("older") = "", py::arg("factors") = "")
      .def("is_deviation", &Schedule::is_deviation, py::arg("param"))
      .def(
          "find_deviation",
          [](const Schedule& self, std::string_view held) { return self.find_deviation(flags_of(held)); },
          py::arg("held"));
}

// Whether both are lists of the same objects in the same order. A comparison in Python would ask tensors whether they are
// equal, or take ten times as long.
inline bool are_same_objects(py::handle a, py::handle b) {
  if (!PyList_Check(a.ptr()) || !PyList_Check(b.ptr()) || PyList_GET_SIZE(a.ptr()) != PyList_GET_SIZE(b.ptr())) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a.ptr()); ++i) {
    if (PyList_GET_ITEM(a.ptr(), i) != PyList_GET_ITEM(b.ptr(), i)) {
      return false;
    }
  }
  return true;
}

class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  // `owner`: a weak reference to what has the methods on_gradient(index, param), run_last(index, param) and launch_ready().
  Arrivals(std::shared_ptr<Schedule> schedule, int bucket_count, py::object owner)
      : schedule_(std::move(schedule)), owner_(std::move(owner)), buckets_(static_cast<size_t>(bucket_count)) {}

  // Elements [begin, begin + numel) of a bucket hold the elements of a parameter from `param_begin` on.
  struct Part {
    int bucket;
    int64_t begin;
    int64_t param_begin;
    int64_t numel;
  };

  // The next parameter, and the placeholder for its p.grad.
  void add_param(py::handle param, py::object placeholder, const std::vector<std::vector<int64_t>>& parts) {
    const dlpack::Described own = dlpack::describe(param);
    Param added{std::move(placeholder), own.shape, own.strides, own.numel, own.dtype, {}};
    for (const std::vector<int64_t>& part : parts) {
      BW_EXPECTS(part.size() == 4 && part[0] >= 0 && part[0] < static_cast<int64_t>(buckets_.size()) &&
                     part[2] + part[3] <= own.numel,
                 "add_param: parts are (bucket, begin, param_begin, numel)");
      added.parts.push_back({static_cast<int>(part[0]), part[1], part[2], part[3]});
    }
    params_.push_back(std::move(added));
  }

  // Gradients may come in here from now on, but not those of the parameters `blocked` (flags; empty: of none).
  // `launch`: buckets are to be reduced as they fill.
  void enable(std::string_view blocked, bool launch) {
    blocked_.assign(blocked.begin(), blocked.end());
    blocked_.resize(params_.size());
    launch_ = launch;
    is_enabled_ = true;
  }
  void disable() { is_enabled_ = false; }
  // From now on the hooks of this process ask each placeholder whether torch's reducer has read it: [Note: reducer under
  // DDP]. Until a reducer is met the question would only cost time.
  static void expect_reducers() { expects_reducers_ = true; }
  // Inside no_sync hooks do nothing: autograd accumulates in p.grad.
  void ignore(bool is_ignored) { is_ignored_ = is_ignored; }

  // Where the first round of a bucket gathers: a contiguous tensor that the caller keeps until `shut`.
  void open(int bucket, py::handle memory) {
    const dlpack::Described tensor = dlpack::describe_item(memory, {"memory", bucket});
    BW_EXPECTS(tensor.is_contiguous(), "memory is not contiguous");
    buckets_.at(static_cast<size_t>(bucket)) = {static_cast<std::byte*>(tensor.data), tensor.numel, tensor.dtype};
  }
  void shut(int bucket) { buckets_.at(static_cast<size_t>(bucket)) = {}; }

  // Per parameter what is in p.grad: 0 nothing, 1 its placeholder, 2 anything else.
  py::bytes look(const py::sequence& params) const {
    std::string found(params_.size(), '\0');
    BW_EXPECTS(py::len(params) == params_.size(), "look: other parameters than were added");
    for (size_t index = 0; index < params_.size(); ++index) {
      const py::object grad = py::object(params[index]).attr(names().grad);
      found[index] = grad.is_none() ? '\0' : grad.is(params_[index].placeholder) ? '\1' : '\2';
    }
    return found;
  }

  // The hook of a parameter: a function of the parameter.
  py::object hook(int index) {
    BW_EXPECTS(index >= 0 && index < static_cast<int>(params_.size()), "hook: no such parameter");
    static PyMethodDef method = {"on_gradient", &Arrivals::call, METH_O, nullptr};
    auto* context = new Context{shared_from_this(), index};
    py::capsule self(context, [](void* context) { delete static_cast<Context*>(context); });
    return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, self.ptr(), nullptr));
  }

 private:
  struct Param {
    py::object placeholder;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    int64_t numel;
    DType dtype;
    std::vector<Part> parts;
  };
  struct Bucket {
    std::byte* memory = nullptr;
    int64_t numel = 0;
    DType dtype = DType::kFloat32;
  };
  struct Context {
    std::shared_ptr<Arrivals> arrivals;
    int index;
  };

  // Larger gradients are copied by Python, without the GIL. Up to here it is kept for a few milliseconds, about as long
  // as the interpreter lets a thread keep it (5 ms), and longer only where the bucket's memory is touched for the first
  // time. What Python does about a gradient is slow: after a backward's large operations nothing of it is in the cache.
  static constexpr int64_t kMostBytes = 16 << 20;

  // Attributes.
  struct Names {
    PyObject* grad = PyUnicode_InternFromString("grad");
    PyObject* hooks = PyUnicode_InternFromString("_post_accumulate_grad_hooks");
    PyObject* is_in_reducer = PyUnicode_InternFromString("is_in_reducer");
  };
  static const Names& names() {
    static const Names names;
    return names;
  }

  static PyObject* call(PyObject* self, PyObject* param) {
    auto* context = static_cast<Context*>(PyCapsule_GetPointer(self, nullptr));
    if (context == nullptr) {
      return nullptr;
    }
    try {
      const std::shared_ptr<Arrivals> arrivals = context->arrivals;  // whoever is called may drop the hook
      arrivals->on_gradient(context->index, param, self);
      Py_RETURN_NONE;
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }

  // Whether the hook `self` is the last that torch calls with the parameter. A hook that was registered later may edit p.grad.
  static bool is_last(py::handle param, PyObject* self) {
    const py::object hooks = param.attr(names().hooks);
    if (!PyDict_Check(hooks.ptr()) || PyDict_Size(hooks.ptr()) <= 1) {
      return true;
    }
    PyObject* hook = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(hooks.ptr(), &at, nullptr, &hook) != 0;) {
    }
    return hook == nullptr || (PyCFunction_Check(hook) && PyCFunction_GET_SELF(hook) == self);
  }

  void on_gradient(int index, py::handle param, PyObject* self) {
    if (is_ignored_) {
      return;
    }
    const Param& known = params_[static_cast<size_t>(index)];
    {
      const py::object grad = param.attr(names().grad);
      if (grad.is_none() || grad.is(known.placeholder)) {
        return;
      }
      if (!is_last(param, self)) {
        return tell("run_last", index, param);
      }
      if (!take(index, known, grad)) {
        return tell("on_gradient", index, param);
      }
    }
    const bool is_ready = schedule_->arrive(index, launch_);
    if (PyObject_SetAttr(param.ptr(), names().grad, known.placeholder.ptr()) != 0) {
      throw py::error_already_set();
    }
    if (is_ready) {
      tell("launch_ready");
    }
  }

  template <class... Args>
  void tell(const char* method, Args... args) const {
    if (const py::object owner = owner_(); !owner.is_none()) {
      owner.attr(method)(args...);
    }
  }

  // Copies a gradient into its buckets; false, and nothing done, if that is for Python.
  bool take(int index, const Param& known, const py::object& grad) {
    if (!is_enabled_ || blocked_[static_cast<size_t>(index)] || !schedule_->is_first(index) ||
        known.numel * static_cast<int64_t>(size_of(known.dtype)) > kMostBytes) {
      return false;
    }
    TensorAbi tensor;
    if (Py_TYPE(grad.ptr()) != reinterpret_cast<PyTypeObject*>(dlpack::torch_api().tensor_type) ||
        !dlpack::look_at(grad, &tensor) || !is_like(known, tensor) ||
        (expects_reducers_ && py::object(known.placeholder.attr(names().is_in_reducer)).ptr() == Py_True)) {
      return false;
    }
    for (const Part& part : known.parts) {
      const Bucket& bucket = buckets_[static_cast<size_t>(part.bucket)];
      if (bucket.memory == nullptr || part.begin + part.numel > bucket.numel) {
        return false;
      }
    }
    const auto* from = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    const int64_t from_bytes = static_cast<int64_t>(size_of(known.dtype));
    for (const Part& part : known.parts) {
      const Bucket& bucket = buckets_[static_cast<size_t>(part.bucket)];
      const CopyItem item{bucket.memory + part.begin * static_cast<int64_t>(size_of(bucket.dtype)),
                          from + part.param_begin * from_bytes, part.numel, bucket.dtype, known.dtype};
      copy_all({&item, 1});
    }
    return true;
  }

  using TensorAbi = dlpack::TensorAbi;

  // Whether the tensor lies in memory as the parameter does. Autograd's zero tensors lie nowhere.
  static bool is_like(const Param& known, const TensorAbi& tensor) {
    if ((tensor.data == nullptr && known.numel != 0) || tensor.device.type != 1 ||
        tensor.ndim != static_cast<int32_t>(known.shape.size()) || dlpack::find_dtype(tensor.dtype) != known.dtype) {
      return false;
    }
    for (size_t i = 0; i < known.shape.size(); ++i) {
      if (tensor.shape[i] != known.shape[i]) {
        return false;
      }
      if (known.numel > 1 && tensor.shape[i] != 1 &&
          (tensor.strides == nullptr || tensor.strides[i] != known.strides[i])) {
        return false;
      }
    }
    return true;
  }

  static inline bool expects_reducers_ = false;

  std::shared_ptr<Schedule> schedule_;
  py::object owner_;
  std::vector<Bucket> buckets_;
  std::vector<Param> params_;
  std::vector<uint8_t> blocked_;
  bool is_enabled_ = false;
  bool is_ignored_ = false;
  bool launch_ = true;
};

inline void bind_arrivals(py::module_& m) {
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init<std::shared_ptr<Schedule>, int, py::object>(), py::arg("schedule"), py::arg("bucket_count"),
           py::arg("owner"))
      .def("add_param", &Arrivals::add_param, py::arg("param"), py::arg("placeholder"), py::arg("parts"))
      .def("enable", &Arrivals::enable, py::arg("blocked"), py::arg("launch"))
      .def("disable", &Arrivals::disable)
      .def_static("expect_reducers", &Arrivals::expect_reducers)
      .def("ignore", &Arrivals::ignore, py::arg("is_ignored"))
      .def("open", &Arrivals::open, py::arg("bucket"), py::arg("memory"))
      .def("shut", &Arrivals::shut, py::arg("bucket"))
      .def("look", &Arrivals::look, py::arg("params"))
      .def("hook", &Arrivals::hook, py::arg("index"));
  m.def("are_same_objects", &are_same_objects, py::arg("a"), py::arg("b"));
}

}  // namespace bucketwheel
