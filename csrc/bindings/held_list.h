// HeldList: the tensors of one call, kept alive by their Python objects, which any thread may drop without the GIL. Their
// memory lives with them as long as nobody gives them other memory.
//
// [Note: dropped without the GIL]
// An operation ends in a thread of ours, and its end must not wait for the GIL: a caller that runs Python code keeps it
// for 5 ms at a time, and every later operation would be late. DLPack's own owners take it, since a tensor that has a
// Python object tells that object when its last native owner goes. So a HeldList owns Python references, and a thread
// without the GIL puts them on one list of the process. Whoever comes back from a call of ours with the GIL empties it,
// else the main thread at its next bytecode, by Py_AddPendingCall(), which needs no GIL. So what an operation used is
// free when a call that waited for it returns, unless another thread is just at it.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "bindings/dlpack.h"

namespace bucketwheel {

namespace py = pybind11;

// References to be dropped by somebody who has the GIL.
class PendingDecrefs {
 public:
  static PendingDecrefs& all() { return per_process<PendingDecrefs>(); }

  // From any thread. With `has_successor` this thread is about to call drop().
  void add(std::vector<PyObject*> references, bool has_successor) noexcept {
    std::lock_guard lock(mutex_);
    if (has_stopped_) {
      return;  // the interpreter ends: what is left stays
    }
    try {
      references_.insert(references_.end(), references.begin(), references.end());
    } catch (const std::bad_alloc&) {
      return;  // they stay
    }
    is_empty_.store(false, std::memory_order_release);
    if (!has_successor && !is_announced_) {
      is_announced_ = Py_AddPendingCall(&PendingDecrefs::drop_in_main_thread, nullptr) == 0;
    }
  }

  // With the GIL.
  void drop() noexcept {
    if (is_empty_.load(std::memory_order_acquire)) {
      return;
    }
    std::vector<PyObject*> now;  // dropping one may run any Python code, and come back here
    {
      std::lock_guard lock(mutex_);
      now.swap(references_);
      is_empty_.store(true, std::memory_order_release);
    }
    for (PyObject* reference : now) {
      Py_DECREF(reference);
    }
  }

  // At the interpreter's end: nothing is dropped any more.
  void stop() noexcept {
    std::lock_guard lock(mutex_);
    has_stopped_ = true;
  }

 private:
  static int drop_in_main_thread(void*) {
    {
      std::lock_guard lock(all().mutex_);
      all().is_announced_ = false;
    }
    all().drop();
    return 0;
  }

  std::mutex mutex_;
  std::vector<PyObject*> references_;
  std::atomic<bool> is_empty_{true};
  bool is_announced_ = false;
  bool has_stopped_ = false;
};

// Without the GIL while it lives; then what was dropped meanwhile goes.
class WithoutGil {
 public:
  WithoutGil() { ++depth(); }
  ~WithoutGil() {
    --depth();
    released_.reset();
    PendingDecrefs::all().drop();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Whether the calling thread has one.
  static bool is_here() { return depth() != 0; }

 private:
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
  std::optional<py::gil_scoped_release> released_{std::in_place};
};

class HeldList {
 public:
  HeldList() = default;
  HeldList(const HeldList&) = delete;
  HeldList& operator=(const HeldList&) = delete;
  ~HeldList() {
    if (references_.empty()) {
      return;
    }
    if (WithoutGil::is_here() || PyGILState_Check() == 0) {
      PendingDecrefs::all().add(std::move(references_), WithoutGil::is_here());
      return;
    }
    for (PyObject* reference : references_) {
      Py_DECREF(reference);
    }
  }

  // With the GIL, like the next two.
  void reserve(size_t count) { references_.reserve(count); }
  void hold(py::handle object) { references_.push_back(object.inc_ref().ptr()); }
  // A tensor, kept alive from now on. False, with nothing kept and no Python error, for what is none.
  bool hold(py::handle object, dlpack::TensorAbi* tensor) {
    if (!dlpack::look_at(object, tensor)) {
      return false;
    }
    hold(object);
    return true;
  }

  // From now on by aliases of theirs: what is done to the tensors themselves (`.data = ...`, `set_`) leaves the memory alone.
  void hold_aliases() {
    for (PyObject*& reference : references_) {
      PyObject* const tensor = reference;
      reference = py::handle(tensor).attr("detach")().release().ptr();
      Py_DECREF(tensor);
    }
  }

 private:
  std::vector<PyObject*> references_;
};

// One tensor, kept alive.
inline std::shared_ptr<HeldList> held(py::handle tensor) {
  auto list = std::make_shared<HeldList>();
  list->hold(tensor);
  return list;
}

}  // namespace bucketwheel
