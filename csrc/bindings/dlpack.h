// Tensors across the Python border, without torch headers: the DLPack C exchange API that torch.Tensor carries as
// `__dlpack_c_exchange_api__` (torch >= 2.10; DLPack 1.3 layout).
//
//   describe(tensor)   a borrowed look at a tensor: valid while the caller holds the Python object
//   hold(tensor)       an owner that keeps the memory alive (released on any thread, without the GIL)
//   make_tensor(...)   a torch.Tensor over our memory; each has a storage and a version counter of its own
//
// Where the CUDA device is simulated, CPU tensors may pose as tensors of cuda:0 (device/cuda_api.h).
//
// The structs below declare the ABI of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/fork.h"
#include "device/cuda_api.h"
#include "device/device.h"

namespace bucketwheel::dlpack {

namespace py = pybind11;

struct Version {
  uint32_t major;
  uint32_t minor;
};
struct DeviceAbi {
  int32_t type;  // 1 cpu, 2 cuda
  int32_t index;
};
struct DTypeAbi {
  uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat
  uint8_t bits;
  uint16_t lanes;
};
struct TensorAbi {
  void* data;
  DeviceAbi device;
  int32_t ndim;
  DTypeAbi dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ManagedTensor {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  TensorAbi tensor;
};
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(TensorAbi*, ManagedTensor**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*managed_to_object)(ManagedTensor* tensor, void** out_object);
  int (*tensor_from_object)(void* object, TensorAbi* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

// torch.Tensor and its exchange table, looked up once per process.
struct Torch {
  PyObject* tensor_type;
  const ExchangeApi* api;
};
inline const Torch& torch_api() {
  static const Torch torch = [] {
    py::object type = py::module_::import("torch").attr("Tensor");
    if (!py::hasattr(type, "__dlpack_c_exchange_api__")) {
      throw Error("torch.Tensor has no __dlpack_c_exchange_api__: bucketwheel needs torch >= 2.10");
    }
    py::object capsule = type.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) {
      throw py::error_already_set();
    }
    if (api->version.major != 1) {
      throw Error("torch has DLPack " + std::to_string(api->version.major) + ", bucketwheel supports DLPack 1");
    }
    return Torch{type.release().ptr(), api};  // both live as long as the process
  }();
  return torch;
}

// Without a bound method or a tuple of arguments in between.
inline py::object call_method(py::handle object, PyObject* name) {
  auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!answer) {
    throw py::error_already_set();
  }
  return answer;
}

// torch negates some tensors when they are read (`x.conj().imag`, `torch._neg_view`): their memory holds the values without
// the sign, and DLPack does not say so. Nobody here may read or write such memory. Asking takes 60 ns, in which other
// threads may take the GIL.
inline bool is_negative_view(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");  // lives as long as the process
  return call_method(tensor, name).ptr() == Py_True;
}

// In the order of DType.
inline constexpr DTypeAbi kDTypeAbis[] = {{2, 32, 1}, {4, 16, 1}, {2, 16, 1}, {2, 64, 1}, {0, 64, 1},
                                          {0, 32, 1}, {1, 8, 1},  {0, 16, 1}, {0, 8, 1}};
static_assert(std::size(kDTypeAbis) == std::size(kDTypeNames));
inline constexpr const char* kSupportedDTypes =
    ": float32, bfloat16, float16, float64, int64, int32, int16, int8 and uint8 are supported";

inline std::optional<DType> find_dtype(const DTypeAbi& dtype) {
  for (size_t i = 0; i < std::size(kDTypeAbis); ++i) {
    if (dtype.code == kDTypeAbis[i].code && dtype.bits == kDTypeAbis[i].bits && dtype.lanes == 1) {
      return static_cast<DType>(i);
    }
  }
  return std::nullopt;
}
inline DTypeAbi abi_of(DType dtype) { return kDTypeAbis[static_cast<size_t>(dtype)]; }

// None: neither the cpu nor cuda.
inline std::optional<DeviceId> device_of(const DeviceAbi& device) {
  if (device.type != 1 && device.type != 2) {
    return std::nullopt;
  }
  if (device.type == 1 && !is_posing()) {
    return DeviceId{};
  }
  return DeviceId{DeviceId::Kind::kCuda, device.type == 1 ? 0 : device.index};
}
inline DeviceAbi abi_of(DeviceId device) {
  return device.kind == DeviceId::Kind::kCpu || is_posing() ? DeviceAbi{1, 0} : DeviceAbi{2, device.index};
}

// torch's current stream on a CUDA device: what the caller's work is enqueued in.
inline void* current_cuda_stream(int index) {
  if (is_posing()) {
    return posed_stream();
  }
  void* stream = nullptr;
  if (torch_api().api->current_stream(2, index, &stream) != 0) {
    throw py::error_already_set();
  }
  return stream;
}

inline std::string text_of(std::span<const int64_t> values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

// What native code needs to know of a tensor. Strides count elements.
struct Described {
  void* data = nullptr;
  int64_t numel = 1;
  DType dtype = DType::kFloat32;
  DeviceId device;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  // Row-major without gaps.
  bool is_contiguous() const {
    int64_t expected = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      if (shape[i] != 1 && strides[i] != expected) {
        return numel == 0;
      }
      expected *= shape[i];
    }
    return true;
  }
  std::string shape_text() const { return text_of(shape); }
  std::string layout_text() const { return "shape " + text_of(shape) + ", strides " + text_of(strides); }
};

inline bool is_tensor(py::handle object) {
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch_api().tensor_type)) != 0;
}
inline void expect_tensor(py::handle object) {
  if (!is_tensor(object)) {
    throw TypeError(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
  if (is_negative_view(object)) {
    throw TypeError("the tensor is a negative view (is_neg()), whose memory has the opposite sign: pass resolve_neg()");
  }
}

inline Described describe(py::handle object) {
  expect_tensor(object);
  TensorAbi tensor;
  if (torch_api().api->tensor_from_object(object.ptr(), &tensor) != 0) {
    throw py::error_already_set();
  }
  const std::optional<DType> dtype = find_dtype(tensor.dtype);
  if (!dtype) {
    throw TypeError("unsupported dtype " + py::str(object.attr("dtype")).cast<std::string>() + kSupportedDTypes);
  }
  const std::optional<DeviceId> device = device_of(tensor.device);
  if (!device) {
    throw TypeError("unsupported device (DLPack type " + std::to_string(tensor.device.type) +
                    "): cpu and cuda are supported");
  }
  Described out;
  out.device = *device;
  out.dtype = *dtype;
  out.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  out.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  out.strides.resize(tensor.ndim);
  for (int i = tensor.ndim; i-- > 0;) {
    out.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : out.numel;
    out.numel *= tensor.shape[i];
  }
  if (tensor.data == nullptr && out.numel != 0) {
    throw TypeError("the tensor has no memory, like a zero tensor of autograd: pass a clone()");
  }
  return out;
}

// A list or tuple, or whatever else has items by number, but a tensor.
inline py::sequence sequence_of(const py::object& object, const char* name, const char* items = "tensors") {
  if (!PySequence_Check(object.ptr()) || is_tensor(object)) {
    throw TypeError(std::string(name) + " is a " + Py_TYPE(object.ptr())->tp_name + ", expected a list of " + items);
  }
  return py::reinterpret_borrow<py::sequence>(object);
}

// Keeps the tensor's memory alive.
inline std::shared_ptr<void> hold(py::handle object) {
  expect_tensor(object);
  ManagedTensor* managed = nullptr;
  if (torch_api().api->managed_from_object(object.ptr(), &managed) != 0) {
    throw py::error_already_set();
  }
  return {managed, [](ManagedTensor* tensor) { tensor->deleter(tensor); }};
}

// A borrowed look, as describe() has it, without the copies. False, and no Python error, for what is no tensor, and for
// what describe() does not take. `may_be_negative`: whether to ask.
inline bool look_at(py::handle object, TensorAbi* tensor, bool may_be_negative = true) {
  if (!is_tensor(object) || (may_be_negative && is_negative_view(object))) {
    return false;
  }
  if (torch_api().api->tensor_from_object(object.ptr(), tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  return true;
}

// Whether the tensor is on `device` and has no gaps; then its elements are `*numel` from `*data` on.
inline bool is_dense_on(const TensorAbi& tensor, DeviceId device, void** data, int64_t* numel) {
  if (device_of(tensor.device) != device) {
    return false;
  }
  int64_t dense = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides != nullptr && tensor.strides[i] != dense) {
      return false;
    }
    dense *= tensor.shape[i];
  }
  if (tensor.data == nullptr && dense != 0) {
    return false;
  }
  *data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  *numel = dense;
  return true;
}

// A contiguous torch.Tensor over `data` on `device`; `owner` lives until the tensor's storage dies.
inline py::object make_tensor(void* data, DType dtype, std::vector<int64_t> shape, DeviceId device,
                              std::shared_ptr<void> owner) {
  struct Context {
    ManagedTensor managed;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    std::shared_ptr<void> owner;
  };
  auto context = std::make_unique<Context>();
  context->shape = std::move(shape);
  context->owner = std::move(owner);
  context->strides.resize(context->shape.size());
  int64_t dense = 1;
  for (size_t i = context->shape.size(); i-- > 0;) {
    context->strides[i] = dense;
    dense *= context->shape[i];
  }
  context->managed = {torch_api().api->version,
                      context.get(),
                      [](ManagedTensor* self) { delete static_cast<Context*>(self->manager_ctx); },
                      0,
                      {data, abi_of(device), static_cast<int32_t>(context->shape.size()), abi_of(dtype),
                       context->shape.data(), context->strides.data(), 0}};
  void* object = nullptr;
  if (torch_api().api->managed_to_object(&context->managed, &object) != 0) {
    throw py::error_already_set();
  }
  (void)context.release();  // the tensor owns it now
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

// ---- layout
//
// The strict layout rule of the kernels: the tensors of one row are non-overlapping and dense, and have equal shapes
// and strides, so that element i of each in memory order is the same element. Anything else is an error, never a
// guess.

// Some permutation of a contiguous tensor: every element of the memory it spans is used, once.
inline bool is_dense(const Described& tensor) {
  if (tensor.numel == 0 || tensor.is_contiguous()) {
    return true;
  }
  std::vector<size_t> order;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] != 1) {
      order.push_back(i);
    }
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tensor.strides[a] < tensor.strides[b]; });
  int64_t expected = 1;
  for (size_t i : order) {
    if (tensor.strides[i] != expected) {
      return false;
    }
    expected *= tensor.shape[i];
  }
  return true;
}

// Strides of dimensions of one element mean nothing, as do all strides of an empty tensor.
inline bool has_same_strides(const Described& a, const Described& b) {
  for (size_t i = 0; i < a.shape.size() && a.numel > 0; ++i) {
    if (a.shape[i] != 1 && a.strides[i] != b.strides[i]) {
      return false;
    }
  }
  return true;
}

// Of two dense tensors.
inline bool overlap(const Described& a, const Described& b) {
  const auto* a_begin = static_cast<const std::byte*>(a.data);
  const auto* b_begin = static_cast<const std::byte*>(b.data);
  return a_begin < b_begin + b.numel * static_cast<int64_t>(size_of(b.dtype)) &&
         b_begin < a_begin + a.numel * static_cast<int64_t>(size_of(a.dtype));
}

// A tensor of a list, for messages: "params[3]"; without an index "tensor". The text is made only when a check fails.
struct Name {
  const char* list;
  int64_t index = -1;
  std::string text() const { return std::string(list) + (index < 0 ? "" : "[" + std::to_string(index) + "]"); }
};

inline void expect_dense(const Described& tensor, Name name) {
  BW_EXPECTS(is_dense(tensor), name.text() + " has gaps or overlaps itself: " + tensor.layout_text());
}
inline void expect_same_layout(const Described& tensor, Name name, const Described& like, Name like_name) {
  BW_EXPECTS(tensor.shape == like.shape,
             name.text() + " has shape " + tensor.shape_text() + ", " + like_name.text() + " has " + like.shape_text());
  BW_EXPECTS(has_same_strides(tensor, like), name.text() + " has strides " + text_of(tensor.strides) + ", " +
                                                 like_name.text() + " has " + text_of(like.strides) + " (shape " +
                                                 like.shape_text() + ")");
}
inline void expect_dtype(const Described& tensor, DType dtype, Name name) {
  if (tensor.dtype != dtype) {
    throw TypeError(name.text() + " is " + name_of(tensor.dtype) + ", expected " + name_of(dtype));
  }
}
// What the kernels compute with.
inline void expect_float(const Described& tensor, Name name) {
  if (!is_float(tensor.dtype)) {
    throw TypeError(name.text() + " is " + name_of(tensor.dtype) + ", expected float32, bfloat16, float16 or float64");
  }
}

inline std::string text_of(DeviceId device) {
  return device.kind == DeviceId::Kind::kCpu ? "the cpu" : "cuda:" + std::to_string(device.index);
}
inline void expect_same_device(const Described& tensor, Name name, const Described& like, Name like_name) {
  BW_EXPECTS(tensor.device == like.device, name.text() + " is on " + text_of(tensor.device) + ", " + like_name.text() +
                                               " on " + text_of(like.device));
}

inline void expect_device(const Described& tensor, DeviceId device, Name name) {
  BW_EXPECTS(tensor.device == device,
             name.text() + " is on " + text_of(tensor.device) + ", expected " + text_of(device));
}

inline Described describe_on_any_device(py::handle object, Name name) {
  try {
    return describe(object);
  } catch (const py::error_already_set& error) {  // sparse, meta, conjugated: whatever has no plain memory
    const std::string what = error.what();
    throw TypeError(name.text() + " has no strided memory: " + what.substr(0, what.find('\n')));
  } catch (const TypeError& error) {
    throw TypeError(name.text() + ": " + error.what());
  }
}
inline Described describe_item(py::handle object, Name name, DeviceId device = {}) {
  Described tensor = describe_on_any_device(object, name);
  expect_device(tensor, device, name);
  return tensor;
}

}  // namespace bucketwheel::dlpack

// ---- held lists
//
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
