// Bindings of window/: the hooks of parameters, and what Python asks of a window. Flags and notes are bytes, one for each
// parameter; factors are doubles, as bytes.
//
// [Note: hooks] A post-accumulate hook takes each gradient out of p.grad into its bucket and puts the placeholder there. It
// is the last hook of its parameter: others may edit the gradient. A repeat finds the placeholder in p.grad, and autograd
// would add to it, which goes through Python's dispatcher. So from the first repeat on a hook *before* accumulation takes the
// placeholder out, or puts the deferred tensor of no_sync() in its place, and autograd hands over the next gradient, or adds
// to the deferred one. It does so only where nothing can come in between, and nobody else looks at p.grad before ours does:
// it is the last hook before accumulation, ours is the only one after it, and the backward is no torch.autograd.grad(). Both
// are C functions and know the window weakly. Python (grads/window.py, `owner`) is asked for what is rare: a gradient that is
// no plain tensor in the order of its parameter, one that meets a pending factor, a hook that was registered after ours,
// captures, errors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/comm_py.h"
#include "bindings/dlpack.h"
#include "bindings/grad_table_py.h"
#include "bindings/pool_py.h"
#include "plan/schedule.h"
#include "window/window.h"

namespace bucketwheel {

namespace py = pybind11;

inline Flags flags_of(std::string_view bytes) { return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}; }

// Attributes and methods of tensors and of the owner.
struct WindowNames {
  PyObject* grad = PyUnicode_InternFromString("grad");
  PyObject* hooks = PyUnicode_InternFromString("_post_accumulate_grad_hooks");
  PyObject* hooks_before = PyUnicode_InternFromString("_backward_hooks");
  PyObject* is_in_reducer = PyUnicode_InternFromString("is_in_reducer");
  PyObject* storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  static const WindowNames& all() {
    static const WindowNames names;
    return names;
  }
};

class PyWindow : public std::enable_shared_from_this<PyWindow> {
 public:
  // `owner`: a weak reference to the Python object of grads/window.py. `params`: with the placeholder of each.
  PyWindow(std::unique_ptr<Window> window, py::object owner,
           const std::vector<std::pair<py::object, py::object>>& params, bool overlap, bool is_capturable)
      : window_(std::move(window)), owner_(std::move(owner)), overlap_(overlap), is_capturable_(is_capturable) {
    for (const auto& [param, placeholder] : params) {
      const auto dtype = py::str(param.attr("dtype")).cast<std::string>().substr(sizeof("torch.") - 1);
      const auto sizes = [&](const py::object& of) { return of.cast<std::vector<int64_t>>(); };
      params_.push_back({param, placeholder, sizes(param.attr("shape")), sizes(param.attr("stride")()),
                         param.attr("numel")().cast<int64_t>(), dtype_named(dtype)});  // a sharded one has no memory
    }
    window_->observer = &label_reduction;
  }
  ~PyWindow() {
    window_->observer = nullptr;  // a Python function
    const WithoutGil unlocked;
    window_.reset();
  }
  PyWindow(const PyWindow&) = delete;
  PyWindow& operator=(const PyWindow&) = delete;
  Window& window() { return *window_; }
  // ---- the gate: `with window:`, in which all calls below are made
  void lock() {
    if (!window_->gate.try_lock()) {
      const WithoutGil unlocked;
      window_->gate.lock();
    }
  }
  void unlock() { window_->gate.unlock(); }

  // ---- hooks
  // A function of the parameter (after accumulation), or of the gradient (before).
  py::object hook(int index, bool before) {
    static PyMethodDef after_method = {"on_gradient", &PyWindow::call<&PyWindow::on_gradient>, METH_O, nullptr};
    static PyMethodDef before_method = {"before_gradient", &PyWindow::call<&PyWindow::before_gradient>, METH_O,
                                        nullptr};
    BW_EXPECTS(index >= 0 && index < static_cast<int>(params_.size()), "hook: there is no such parameter");
    return function(before ? &before_method : &after_method, index);
  }
  // From now on the hooks of this process ask each placeholder whether torch's reducer has read it: [Note: reducer under
  // DDP]. Until a reducer is met the question would only cost time.
  static void expect_reducers() { expects_reducers_ = true; }
  // Inside no_sync() hooks do nothing: autograd accumulates in p.grad.
  void ignore(bool is_ignored) { is_ignored_ = is_ignored; }

  // Per parameter what is in p.grad: 0 nothing, 1 its placeholder (also where a hook has taken that out), 2 anything else.
  std::string look() const {
    std::string found(params_.size(), '\0');
    for (size_t index = 0; index < params_.size(); ++index) {
      const Param& param = params_[index];
      const py::object grad = grad_of(param);
      const bool is_placeholder = grad.is(param.placeholder) || (grad.is_none() && param.is_taken);
      found[index] = is_placeholder ? '\1' : grad.is_none() ? '\0' : '\2';
    }
    return found;
  }

  // ---- gradients that no hook takes
  void give(int index, py::handle grad, bool add, bool launch) { take(index, grad, nullptr, add, launch); }
  // Takes deferred gradients and those that were assigned by hand. Flags: whether p.grad is a placeholder.
  py::bytes sweep() {
    std::string found = look();
    for (size_t i = 0; i < found.size(); ++i) {
      const bool is_repeat = params_[i].is_taken;
      if (is_repeat && found[i] == '\1') {  // a backward is between our two hooks, in another thread
        set_grad(params_[i], params_[i].placeholder);
        params_[i].is_taken = true;
      }
      const py::object deferred = take_deferred(static_cast<int>(i));
      if (found[i] == '\1' && deferred) {
        take(static_cast<int>(i), deferred, nullptr, true, overlap_);
      } else if (found[i] == '\2') {
        const py::object grad = grad_of(params_[i]);
        take(static_cast<int>(i), grad, nullptr, is_repeat, overlap_);
        set_grad(params_[i], params_[i].placeholder);
      }
      found[i] = found[i] == '\0' ? '\0' : '\1';
    }
    return found;
  }
  // These get no more gradients in this window.
  void start(const std::vector<int>& indices) {
    for (const int index : indices) {
      if (grad_of(at(index)).is(at(index).placeholder)) {
        if (const py::object deferred = take_deferred(index)) {
          take(index, deferred, nullptr, true, true);
        }
      }
    }
    window_->complete(indices, current());
  }
  // no_sync() ends: plain gradients in p.grad become deferred, or replace what there is. Whether there were any.
  bool defer() {
    bool has_any = false;
    for (size_t i = 0; i < params_.size(); ++i) {
      Param& param = params_[i];
      const py::object grad = grad_of(param);
      if (grad.is_none() || grad.is(param.placeholder)) {
        continue;
      }
      const int index = static_cast<int>(i);
      owner().attr("expect_plain")(index, grad);
      is_used_ = false;
      has_any = true;
      const bool has_sum = window_->table().has_sum(index);
      if (window_->is_open() && (has_sum || window_->schedule().has_stored(index))) {
        take(index, grad, nullptr, param.is_taken, false);
      } else {
        if (has_sum) {
          window_->table().forget(index);
        }
        param.deferred = grad;
        ++deferred_count_;
      }
      set_grad(param, param.placeholder);
    }
    return has_any;
  }
  // no_sync() begins: autograd adds to the deferred ones by itself.
  void undefer() {
    for (size_t i = 0; i < params_.size(); ++i) {
      const py::object deferred = take_deferred(static_cast<int>(i));
      if (deferred && grad_of(params_[i]).is(params_[i].placeholder)) {
        set_grad(params_[i], deferred);
      }
    }
  }
  // The tensor that no_sync() has left: the gradient is there and nowhere else. Null: none.
  py::object take_deferred(int index) {
    py::object deferred = std::move(at(index).deferred);
    deferred_count_ -= deferred ? 1 : 0;
    return deferred;
  }
  bool has_deferred() const { return deferred_count_ != 0; }
  py::object deferred(int index) const {
    const py::object& deferred = params_.at(static_cast<size_t>(index)).deferred;
    return deferred ? deferred : py::object(py::none());
  }

  // ---- the end of a window
  void flush(std::string_view held) { window_->flush(held, current()); }
  py::bytes notes(std::string_view held) const {
    const GradTable& table = window_->table();
    return bytes_of(window_->schedule().notes(flags_of(held), table.older(held), table.factors));
  }
  WindowVerdict assume(std::string_view held) const {
    return window_->schedule().assume(flags_of(held), window_->table().older(held), window_->table().factors);
  }
  // All ranks launch and wait for what is left. `held`: flags of what p.grad has a placeholder of, null: all gradients are
  // dropped. Whether there was a late round.
  bool close(const WindowVerdict& agreed, std::optional<std::string_view> held) {
    if (agreed.is_dirty && !window_->is_open()) {
      open(-1, false, agreed.factors);
    }
    if (agreed.is_dirty) {
      std::vector<double>& factors = window_->table().factors;
      factors.assign(factors.size(), 1.0);
      std::ranges::copy(agreed.factors, factors.begin());
    }
    const bool has_late = window_->close(agreed, held.has_value(), current());
    for (size_t i = 0; held && i < params_.size(); ++i) {
      if (agreed.held[i] != 0 && (*held)[i] == 0) {
        set_grad(params_[i], params_[i].placeholder);
      }
    }
    if (held) {
      window_->table().set_held(agreed.held);
    }
    return has_late;
  }
  void zero_grad() {
    window_->discard();
    drop_grads();
  }
  void forget_captured() {
    window_->forget_captured();
    drop_grads();
  }
  // Puts placeholders into p.grad of the first parameters; flags.
  void put_placeholders(std::string_view held) {
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i] != 0) {
        set_grad(params_[i], params_[i].placeholder);
      }
    }
  }
  // Takes placeholders out of p.grad, and gives the memory of buckets back.
  void release() {
    is_released_ = true;
    for (Param& param : params_) {
      if (grad_of(param).is(param.placeholder)) {
        set_grad(param, py::none());
      }
    }
    window_->release(current());
  }
  void replace_by_zero(int index) {
    window_->table().zero(index, current().get());
    window_->table().zeroed.at(static_cast<size_t>(index)) = 1;
    window_->table().set_factor(index, 1.0);
  }
  py::dict memory() const {
    using py::arg;
    const Places& places = window_->places();
    return py::dict(arg("planned") = places.planned_bytes(), arg("load") = places.load_bytes(),
                    arg("buckets") = places.live_bytes(), arg("buckets_peak") = places.peak_bytes(),
                    arg("side") = places.side_bytes(), arg("side_peak") = places.side_peak_bytes(),
                    arg("held") = window_->held_bytes(), arg("held_peak") = window_->held_peak_bytes(),
                    arg("partial_sums") = window_->reductions().partial_bytes());
  }

  bool is_used_ = false;  // a step has used all gradients that there are: set by the step, until the next gradient

 private:
  using TensorAbi = dlpack::TensorAbi;
  struct Param {
    py::object param;
    py::object placeholder;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    int64_t numel;
    DType dtype;
    py::object hooks[2] = {};  // hooks_of()
    py::object deferred = {};  // from the end of no_sync(), until the next gradient or the close
    // before_gradient() has taken the placeholder out of p.grad, so that the gradient that comes is added. Until then.
    bool is_taken = false;
  };
  struct Context {
    std::weak_ptr<PyWindow> window;
    int index;
    int64_t task = -1;  // the backward of whose end the window has yet to be told
    ~Context() {
      const py::error_scope kept;
      const std::shared_ptr<PyWindow> alive = window.lock();
      if (task != -1 && alive != nullptr) {  // it has failed
        try {
          alive->end_backward(*this, nullptr, nullptr);
        } catch (...) {  // NOLINT(bugprone-empty-catch): its own error is on its way
        }
      }
    }
  };
  static py::object grad_of(const Param& param) { return param.param.attr(WindowNames::all().grad); }
  static void set_grad(Param& param, py::handle grad) {
    param.is_taken = false;
    if (PyObject_SetAttr(param.param.ptr(), WindowNames::all().grad, grad.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  Param& at(int index) { return params_.at(static_cast<size_t>(index)); }
  StreamRef current() const { return current_stream(window_->device()); }
  void drop_grads() {
    for (Param& param : params_) {
      param.deferred = {};
      set_grad(param, py::none());
    }
    deferred_count_ = 0;
  }
  py::object owner() const {
    py::object owner = owner_();
    if (owner.is_none()) {
      throw Error("the optimizer of this gradient was deleted");
    }
    return owner;
  }
  template <void (PyWindow::*kBody)(Context&, PyObject*, PyObject*)>
  static PyObject* call(PyObject* self, PyObject* argument) {
    auto* context = static_cast<Context*>(PyCapsule_GetPointer(self, nullptr));
    if (context == nullptr) {
      return nullptr;
    }
    try {
      // Whoever is called may drop the hook, and the window.
      if (const std::shared_ptr<PyWindow> window = context->window.lock()) {
        (window.get()->*kBody)(*context, argument, self);
      }
      Py_RETURN_NONE;
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (...) {
      py::detail::try_translate_exceptions();
    }
    return nullptr;
  }
  py::object function(PyMethodDef* method, int index, int64_t task = -1) {
    auto* context = new Context{weak_from_this(), index, task};
    const py::capsule self(context, [](void* context) { delete static_cast<Context*>(context); });
    return py::reinterpret_steal<py::object>(PyCFunction_NewEx(method, self.ptr(), nullptr));
  }

  // torch's dict of hooks after or before accumulation: the same one for the parameter's life.
  static const py::object& hooks_of(Param& param, bool before) {
    py::object& hooks = param.hooks[before ? 1 : 0];
    if (!hooks) {
      hooks = param.param.attr(before ? WindowNames::all().hooks_before : WindowNames::all().hooks);
    }
    return hooks;
  }
  // Whether `self` is the last hook in such a dict, or the only one.
  static bool is_last(const py::object& hooks, PyObject* self) {
    if (!PyDict_Check(hooks.ptr()) || PyDict_Size(hooks.ptr()) <= 1) {
      return true;
    }
    PyObject* hook = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(hooks.ptr(), &at, nullptr, &hook) != 0;) {
    }
    return hook == nullptr || (PyCFunction_Check(hook) && PyCFunction_GET_SELF(hook) == self);
  }

  bool is_idle() const { return is_ignored_ || is_released_ || window_->is_foreign(); }

  void before_gradient(Context& context, PyObject* gradient, PyObject* self) {
    if (is_idle() || gradient == Py_None) {
      return;
    }
    const std::lock_guard inside(*this);
    Param& param = at(context.index);
    // Others may look at what is deferred: it is in p.grad, with the gradient that comes. But it may be of a capture that has
    // failed.
    const bool is_alone = param.deferred ? !is_capturable_ : PyDict_Size(hooks_of(param, false).ptr()) == 1;
    if (!is_alone || !grad_of(param).is(param.placeholder) || !is_last(hooks_of(param, true), self) || !accumulates()) {
      return;
    }
    const py::object deferred = take_deferred(context.index);
    set_grad(param, deferred ? deferred : py::object(py::none()));
    param.is_taken = !deferred;
  }

  void on_gradient(Context& context, PyObject* tensor, PyObject* self) {
    if (is_idle()) {
      return;
    }
    const std::lock_guard inside(*this);  // a thread that closes the window may take the gradient
    const int index = context.index;
    Param& param = at(index);
    const py::object grad = grad_of(param);
    if (grad.is_none() || grad.is(param.placeholder)) {
      return;
    }
    if (!is_last(hooks_of(param, false), self)) {
      return static_cast<void>(owner().attr("run_last")(index, py::handle(tensor)));
    }
    const bool is_repeat = std::exchange(param.is_taken, false);
    if (!is_repeat && deferred_count_ != 0) {
      take_deferred(index);  // replaced
    }
    if (is_repeat) {  // p.grad stands for what there was, also where taking more of it fails
      set_grad(param, param.placeholder);
      return take(index, grad, &grad, true, overlap_);
    }
    take(index, grad, &grad, false, overlap_);
    set_grad(param, param.placeholder);
  }

  // Takes a gradient into its buckets. `held`: from a hook, so that it may be held until its bucket is full.
  void take(int index, py::handle given, const py::object* held, bool add, bool launch) {
    const Param& param = at(index);
    py::object grad = py::reinterpret_borrow<py::object>(given);
    TensorAbi tensor;
    const bool may_be_reducers =
        expects_reducers_ && py::object(param.placeholder.attr(WindowNames::all().is_in_reducer)).ptr() == Py_True;
    if (may_be_reducers || !is_plain(param, grad, &tensor)) {
      grad = owner().attr("as_plain")(index, grad);
      look_again(grad, &tensor);
    }
    is_used_ = false;
    const StreamRef stream = current();
    if (!window_->is_open()) {
      open(index, !add, {});
    } else if (stream != nullptr && capture_id(*stream) != capture_) {
      owner().attr("expect_same_capture")();
    }
    if (window_->table().has_factor(index)) {
      if (add) {  // the factor will be applied to the sum of both
        grad = owner().attr("unscaled")(index, grad);
        look_again(grad, &tensor);
      } else {
        window_->table().set_factor(index, 1.0);
      }
    }
    Gradient gradient{static_cast<const std::byte*>(tensor.data) + tensor.byte_offset,
                      *dlpack::find_dtype(tensor.dtype), stream, nullptr};
    if (stream != nullptr && held != nullptr && may_be_held(param, grad, gradient.dtype)) {
      gradient.owner = bucketwheel::held(grad);
    }
    if (!window_->arrive(index, gradient, add, launch)) {
      owner().attr("break_promise")(index);
    }
  }

  static void look_again(py::handle grad, TensorAbi* tensor) {
    BW_EXPECTS(dlpack::look_at(grad, tensor), "a gradient has no memory that can be read");
  }

  // Not large, and no view of something larger; and its backward tells when it ends.
  bool may_be_held(const Param& param, py::handle grad, DType dtype) {
    const int64_t bytes = param.numel * static_cast<int64_t>(size_of(dtype));
    if (bytes > Window::kMostHeldBytes) {
      return false;
    }
    const py::object storage = dlpack::call_method(grad, WindowNames::all().storage);
    return PyLong_AsLongLong(dlpack::call_method(storage, WindowNames::all().nbytes).ptr()) <= 2 * bytes &&
           expect_end_of_backward();
  }

  // The backward that goes on; -1: none.
  int64_t current_task() const {
    return PyLong_AsLongLong(py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch_.task_id.ptr())).ptr());
  }
  // Whether the backward that goes on, and has come to a parameter, adds to its gradient.
  bool accumulates() {
    const int64_t task = current_task();
    if (task != -1 && task != asked_task_) {
      try {
        accumulates_ = torch_.will_execute(torch_.node()).cast<bool>();
      } catch (py::error_already_set& error) {  // torch.autograd.grad()
        if (!error.matches(PyExc_RuntimeError)) {
          throw;
        }
        accumulates_ = false;
      }
      asked_task_ = task;
    }
    return task != -1 && accumulates_;
  }
  // end_backward() is called when the backward that goes on ends, also where it fails. False outside of one.
  bool expect_end_of_backward() {
    const int64_t task = current_task();
    if (task != -1 && task != awaited_task_) {
      static PyMethodDef method = {"end_backward", &PyWindow::call_end, METH_NOARGS, nullptr};
      torch_.queue_callback(function(&method, -1, task));
      awaited_task_ = task;
    }
    return task != -1;
  }
  static PyObject* call_end(PyObject* self, PyObject*) { return call<&PyWindow::end_backward>(self, Py_None); }
  void end_backward(Context& context, PyObject*, PyObject*) {
    const int64_t task = std::exchange(context.task, -1);
    const std::lock_guard inside(*this);
    awaited_task_ = awaited_task_ == task ? -1 : awaited_task_;  // what another callback brings is behind this one
    window_->pack_held();
  }

  // `index`: of the parameter whose gradient opens the window and is added to what there is, or `replaces` it; -1: none.
  // `remaining`: of each factor, the part that is not multiplied into the shards; empty: 1.
  void open(int index, bool replaces, const std::vector<double>& remaining) {
    std::string placeholders = look();
    if (index >= 0) {
      placeholders[static_cast<size_t>(index)] = replaces ? '\0' : '\1';
    }
    bool has_any = false, has_plain = false;
    for (size_t i = 0; i < placeholders.size(); ++i) {
      char& what = placeholders[i];
      has_plain = has_plain || what == '\2';
      what = what == '\1' || params_[i].is_taken;  // a gradient that another thread is about to add
      has_any = has_any || what != 0;
    }
    const StreamRef stream = current();
    bool is_captured = false;
    if (stream != nullptr) {
      capture_ = capture_id(*stream);
      if (capture_ != 0 || is_capturable_) {
        is_captured = owner().attr("begin_window")(has_any, has_plain && !is_ignored_).cast<bool>();
      }
    }
    GradTable& table = window_->table();
    for (int i = 0; i < static_cast<int>(params_.size()); ++i) {
      const double rest = remaining.empty() ? 1.0 : remaining[static_cast<size_t>(i)];
      const bool is_unsure = table.may_be_replayed || table.entries[static_cast<size_t>(i)] == EntryState::kScaled;
      if (table.has_sum(i) && placeholders[static_cast<size_t>(i)] != 0 &&
          (table.factors[static_cast<size_t>(i)] != rest || is_unsure)) {
        owner().attr("flush_factor")(i, rest);
      }
    }
    window_->open(placeholders, stream, is_captured);
    if (!has_any && (is_captured || table.may_be_replayed)) {
      owner().attr("reset_factors")();
    }
  }

  // Whether the tensor lies in memory as the parameter does. Autograd's zero tensors lie nowhere.
  bool is_plain(const Param& known, const py::object& grad, TensorAbi* tensor) const {
    if (Py_TYPE(grad.ptr()) != reinterpret_cast<PyTypeObject*>(dlpack::torch_api().tensor_type) ||
        !dlpack::look_at(grad, tensor) || (tensor->data == nullptr && known.numel != 0) ||
        dlpack::device_of(tensor->device) != window_->device() ||
        tensor->ndim != static_cast<int32_t>(known.shape.size()) || dlpack::find_dtype(tensor->dtype) != known.dtype) {
      return false;
    }
    for (size_t i = 0; i < known.shape.size(); ++i) {
      if (tensor->shape[i] != known.shape[i]) {
        return false;
      }
      if (known.numel > 1 && tensor->shape[i] != 1 &&
          (tensor->strides == nullptr || tensor->strides[i] != known.strides[i])) {
        return false;
      }
    }
    return true;
  }

  static inline bool expects_reducers_ = false;

  std::unique_ptr<Window> window_;
  py::object owner_;
  std::vector<Param> params_;
  int deferred_count_ = 0;  // how many parameters have a deferred gradient
  struct {
    const py::module_ module = py::module_::import("torch._C");
    const py::object task_id = module.attr("_current_graph_task_id");
    const py::object node = module.attr("_current_autograd_node");
    const py::object will_execute = module.attr("_will_engine_execute_node");
    const py::object queue_callback =
        py::module_::import("torch.autograd").attr("Variable").attr("_execution_engine").attr("queue_callback");
  } torch_;
  int64_t asked_task_ = -1;
  bool accumulates_ = false;   // the backward `asked_task_`
  int64_t awaited_task_ = -1;  // the backward at whose end what is held is packed
  uint64_t capture_ = 0;       // the capture that the open window is part of; 0: none
  const bool overlap_;
  const bool is_capturable_;
  bool is_ignored_ = false;
  bool is_released_ = false;
};

// Runs what may block without the GIL, if this thread has it.
inline void run_aside(const std::function<void()>& body) {
  if (PyGILState_Check() == 0) {
    body();
    return;
  }
  const WithoutGil unlocked;
  body();
}

// A bucket: elements, dtype, sink, elements of a shard, and its parts (param, begin, param_begin, numel).
using GivenBucket =
    std::tuple<int64_t, std::string, std::shared_ptr<GradSink>, int64_t, std::vector<std::vector<int64_t>>>;

// `comms`: of the shard group; with HSDP of the replicas, and of their all-gathers. `flags`: overlap, is_static,
// is_registered, is_capturable, defers, takes_turns.
inline std::shared_ptr<PyWindow> make_window(const std::vector<CommRef>& comms, std::shared_ptr<Tie> tie,
                                             PoolRef side_pool, const std::vector<GivenBucket>& given,
                                             std::shared_ptr<GradTable> table, const std::vector<GivenPlan>& plans,
                                             int max_inflight, const std::vector<bool>& flags, py::object owner,
                                             const std::vector<std::pair<py::object, py::object>>& params) {
  Reducers reducers{comms.at(0), nullptr, nullptr, std::move(tie), flags.at(4), flags.at(5)};
  if (comms.size() > 1) {
    reducers.replicate = comms[1];
    reducers.replicate_gathers = comms.at(2);
  }
  std::vector<BucketSpec> buckets;
  for (const auto& [numel, dtype, sink, shard_numel, parts] : given) {
    BucketSpec spec{numel, dtype_named(dtype), sink, shard_numel, {}};
    for (const std::vector<int64_t>& part : parts) {
      spec.parts.push_back({static_cast<int>(part.at(0)), part.at(1), part.at(2), part.at(3)});
    }
    buckets.push_back(std::move(spec));
  }
  const WindowOptions options{flags.at(0), max_inflight, flags.at(1), flags.at(2)};
  const StreamRef stream = current_stream(reducers.shard->device());
  auto window =
      std::make_unique<Window>(std::move(reducers), std::move(side_pool), std::move(buckets), std::move(table),
                               plan_of(plans.at(0)), plan_of(plans.at(1)), options, stream, run_aside);
  return std::make_shared<PyWindow>(std::move(window), std::move(owner), params, flags[0], flags.at(3));
}

inline void bind_verdict(py::module_& m) {
  py::class_<WindowVerdict>(m, "WindowVerdict")
      .def_readonly("is_dirty", &WindowVerdict::is_dirty)
      .def_readonly("is_uneven", &WindowVerdict::is_uneven)
      .def_property_readonly("held", [](const WindowVerdict& self) { return bytes_of(self.held); })
      .def_readonly("conflicts", &WindowVerdict::conflicts)
      .def_readonly("scaled_apart", &WindowVerdict::scaled_apart);
}

inline void bind_window(py::module_& m) {
  bind_verdict(m);
  py::class_<PyWindow, std::shared_ptr<PyWindow>>(m, "Window")
      .def(py::init(&make_window), py::arg("comms"), py::arg("tie"), py::arg("side_pool"), py::arg("buckets"),
           py::arg("table"), py::arg("plans"), py::arg("max_inflight"), py::arg("flags"), py::arg("owner"),
           py::arg("params"))
      .def("__enter__", &PyWindow::lock)
      .def("__exit__", [](PyWindow& self, py::handle, py::handle, py::handle) { self.unlock(); })
      .def_static("expect_reducers", &PyWindow::expect_reducers)
      .def("ignore", &PyWindow::ignore, py::arg("is_ignored"))
      .def("look", [](PyWindow& self) { return py::bytes(self.look()); })
      .def("hook", &PyWindow::hook, py::arg("index"), py::arg("before") = false)
      .def("give", &PyWindow::give, py::arg("index"), py::arg("grad"), py::arg("add"), py::arg("launch"))
      .def("sweep", &PyWindow::sweep)
      .def("start", &PyWindow::start, py::arg("indices"))
      .def("defer", &PyWindow::defer)
      .def("undefer", &PyWindow::undefer)
      .def("deferred", &PyWindow::deferred, py::arg("index"))
      .def(
          "take_deferred",
          [](PyWindow& self, int index) {
            const py::object deferred = self.take_deferred(index);
            return deferred ? deferred : py::object(py::none());
          },
          py::arg("index"))
      .def_property_readonly("has_deferred", &PyWindow::has_deferred)
      .def("flush", &PyWindow::flush, py::arg("held"))
      .def("notes", &PyWindow::notes, py::arg("held"))
      .def(
          "agree",
          [](PyWindow& self, const std::vector<std::string_view>& notes) {
            return self.window().schedule().agree(notes);
          },
          py::arg("notes"))
      .def("assume", &PyWindow::assume, py::arg("held"))
      .def("close", &PyWindow::close, py::arg("agreed"), py::arg("held"))
      .def("zero_grad", &PyWindow::zero_grad)
      .def("forget_captured", &PyWindow::forget_captured)
      .def("put_placeholders", &PyWindow::put_placeholders, py::arg("held"))
      .def("release", &PyWindow::release)
      // For tests: called with each launch: bucket, whether its late round, and where in the places it lies (-1: on the side).
      .def(
          "observe",
          [](PyWindow& self, const py::function& observer) {
            self.window().observer = [observer](int bucket, bool late, int64_t offset) {
              observer(bucket, late, offset);
            };
          },
          py::arg("observer"))
      .def("replace_by_zero", &PyWindow::replace_by_zero, py::arg("index"))
      .def("memory", &PyWindow::memory)
      .def_readwrite("is_used", &PyWindow::is_used_)
      .def_property_readonly("is_open", [](PyWindow& self) { return self.window().is_open(); })
      .def_property_readonly("is_learnt", [](PyWindow& self) { return self.window().schedule().is_learnt(); })
      .def_property_readonly("is_dirty", [](PyWindow& self) { return self.window().schedule().is_dirty(); })
      .def(
          "is_private", [](PyWindow& self, int param) { return self.window().schedule().is_private(param); },
          py::arg("param"))
      .def(
          "find_deviation",
          [](PyWindow& self, std::string_view held) { return self.window().schedule().find_deviation(flags_of(held)); },
          py::arg("held"))
      .def_property_readonly("place", [](PyWindow& self) -> py::object {
        const Lease* const lease = self.window().places().lease();
        return lease == nullptr ? py::object(py::none()) : py::object(place_of(*lease));
      });
}

}  // namespace bucketwheel
