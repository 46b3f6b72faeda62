// Tensors across the Python border, without torch headers: the DLPack C exchange API that torch.Tensor carries as
// `__dlpack_c_exchange_api__` (torch >= 2.10; DLPack 1.3 layout).
//
//   describe(tensor)   a borrowed look at a tensor: valid while the caller holds the Python object
//   hold(tensor)       the same, and an owner that keeps the memory alive (released on any thread, without the GIL)
//   make_tensor(...)   a torch.Tensor over our memory; each has a storage and a version counter of its own
//
// Where the CUDA device is simulated, CPU tensors may pose as tensors of cuda:0 (device/cuda_api.h).
//
// The structs below declare the ABI of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
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
      throw Error("torch speaks DLPack " + std::to_string(api->version.major) + ", bucketwheel understands 1");
    }
    return Torch{type.release().ptr(), api};  // both live as long as the process
  }();
  return torch;
}

inline DType dtype_of(const DTypeAbi& dtype) {
  if (dtype.lanes == 1) {
    switch (dtype.code << 8 | dtype.bits) {
      case 2 << 8 | 32:
        return DType::kFloat32;
      case 4 << 8 | 16:
        return DType::kBFloat16;
      case 2 << 8 | 16:
        return DType::kFloat16;
      case 2 << 8 | 64:
        return DType::kFloat64;
      case 0 << 8 | 64:
        return DType::kInt64;
      case 0 << 8 | 32:
        return DType::kInt32;
      case 0 << 8 | 16:
        return DType::kInt16;
      case 0 << 8 | 8:
        return DType::kInt8;
      case 1 << 8 | 8:
        return DType::kUInt8;
      default:
        break;
    }
  }
  throw TypeError("unsupported dtype (DLPack code " + std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) +
                  " bits): float32, bfloat16, float16, float64, int64, int32, int16, int8 and uint8 are supported");
}
inline DTypeAbi abi_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {2, 32, 1};
    case DType::kBFloat16:
      return {4, 16, 1};
    case DType::kFloat16:
      return {2, 16, 1};
    case DType::kFloat64:
      return {2, 64, 1};
    case DType::kInt64:
      return {0, 64, 1};
    case DType::kInt32:
      return {0, 32, 1};
    case DType::kInt16:
      return {0, 16, 1};
    case DType::kInt8:
      return {0, 8, 1};
    case DType::kUInt8:
      return {1, 8, 1};
  }
  throw TypeError("unknown dtype");
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
  std::string shape_text() const {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) {
      text += (i ? ", " : "") + std::to_string(shape[i]);
    }
    return text + "]";
  }
};

inline Described describe_abi(const TensorAbi& tensor) {
  Described out;
  if (tensor.device.type != 1 && tensor.device.type != 2) {
    throw TypeError("unsupported device (DLPack type " + std::to_string(tensor.device.type) +
                    "): cpu and cuda are supported");
  }
  if (tensor.device.type == 1 && !is_posing()) {
    out.device = {DeviceId::Kind::kCpu, 0};
  } else {
    out.device = {DeviceId::Kind::kCuda, tensor.device.type == 1 ? 0 : tensor.device.index};
  }
  out.dtype = dtype_of(tensor.dtype);
  out.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  out.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  out.strides.resize(tensor.ndim);
  int64_t dense = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    out.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
    out.numel *= tensor.shape[i];
  }
  if (tensor.data == nullptr && out.numel != 0) {
    throw TypeError("the tensor has no memory, as autograd's zero tensors: pass a clone()");
  }
  return out;
}

inline void expect_tensor(py::handle object) {
  auto* type = reinterpret_cast<PyTypeObject*>(torch_api().tensor_type);
  if (!PyObject_TypeCheck(object.ptr(), type)) {
    throw TypeError(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
}

inline Described describe(py::handle object) {
  expect_tensor(object);
  TensorAbi tensor;
  if (torch_api().api->tensor_from_object(object.ptr(), &tensor) != 0) {
    throw py::error_already_set();
  }
  return describe_abi(tensor);
}

struct Held {
  Described tensor;
  std::shared_ptr<void> owner;
};
inline Held hold(py::handle object) {
  expect_tensor(object);
  ManagedTensor* managed = nullptr;
  if (torch_api().api->managed_from_object(object.ptr(), &managed) != 0) {
    throw py::error_already_set();
  }
  std::shared_ptr<void> owner(managed, [](void* p) {
    auto* tensor = static_cast<ManagedTensor*>(p);
    tensor->deleter(tensor);
  });
  return {describe_abi(managed->tensor), std::move(owner)};
}

// A borrowed look, as describe() has it, without the copies. False, and no Python error, for what is no tensor.
inline bool look_at(py::handle object, TensorAbi* tensor) {
  if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch_api().tensor_type))) {
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
  const bool is_posed = tensor.device.type == 1 && is_posing();
  const DeviceId own = tensor.device.type == 1 && !is_posed
                           ? DeviceId{}
                           : DeviceId{DeviceId::Kind::kCuda, is_posed ? 0 : tensor.device.index};
  if ((tensor.device.type != 1 && tensor.device.type != 2) || own != device) {
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

}  // namespace bucketwheel::dlpack
