// Bindings of kernels/crc32c.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/dlpack.h"
#include "kernels/crc32c.h"

namespace bucketwheel {

namespace py = pybind11;

// The bytes of a contiguous CPU tensor, or of an object with the buffer protocol (bytes, memoryview, numpy), while it
// lives.
class ByteSpan {
 public:
  explicit ByteSpan(py::handle object) {
    if (dlpack::is_tensor(object)) {
      const dlpack::Described tensor = dlpack::describe_item(object, {"buffer"});
      BW_EXPECTS(tensor.is_contiguous(), "buffer is not contiguous: " + tensor.layout_text());
      data_ = tensor.data;
      size_ = static_cast<size_t>(tensor.numel) * size_of(tensor.dtype);
      return;
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
    data_ = view_.buf;
    size_ = static_cast<size_t>(view_.len);
  }
  ~ByteSpan() { PyBuffer_Release(&view_); }  // nothing for a tensor
  ByteSpan(const ByteSpan&) = delete;
  ByteSpan& operator=(const ByteSpan&) = delete;

  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Py_buffer view_{};
  const void* data_ = nullptr;
  size_t size_ = 0;
};

inline void bind_crc32c(py::module_& m) {
  m.def(
      "crc32c",
      [](py::handle buffer, uint32_t initial) {
        constexpr size_t kLong = size_t{1} << 16;  // what takes longer than other threads take to notice
        const ByteSpan span(buffer);
        std::optional<py::gil_scoped_release> unlocked;
        if (span.size() >= kLong) {
          unlocked.emplace();
        }
        return crc32c(span.data(), span.size(), initial);
      },
      py::arg("buffer"), py::arg("initial") = 0);
}

}  // namespace bucketwheel
