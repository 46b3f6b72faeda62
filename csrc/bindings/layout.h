// The strict layout rule of the kernels: the tensors of one row are non-overlapping and dense, and have equal shapes
// and strides, so that element i of each in memory order is the same element. Anything else is an error, never a
// guess.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "bindings/dlpack.h"

namespace bucketwheel::dlpack {

inline std::string text_of(std::span<const int64_t> values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

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

// A tensor of a list, for messages: "params[3]". The text is made only when a check fails.
inline std::string item_text(const char* list, int64_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}
struct Name {
  const char* list;
  int64_t index;
  std::string text() const { return item_text(list, index); }
};

inline void expect_cpu(const Described& tensor, Name name) {
  BW_EXPECTS(tensor.device.kind == DeviceId::Kind::kCpu, name.text() + " is not on the cpu");
}
inline void expect_dense(const Described& tensor, Name name) {
  BW_EXPECTS(is_dense(tensor), name.text() + " has gaps or overlaps itself: shape " + tensor.shape_text() +
                                   ", strides " + text_of(tensor.strides));
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
  if (device.kind == DeviceId::Kind::kCpu) {
    expect_cpu(tensor, name);
  }
  BW_EXPECTS(tensor.device == device,
             name.text() + " is on " + text_of(tensor.device) + ", expected " + text_of(device));
}

inline Described describe_on_any_device(py::handle object, Name name) {
  if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch_api().tensor_type))) {
    throw TypeError(name.text() + ": expected a torch.Tensor, got " + Py_TYPE(object.ptr())->tp_name);
  }
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
