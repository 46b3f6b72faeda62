// Bindings of kernels/crc32c.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/dlpack.h"
#include "kernels/crc32c.h"

namespace bucketwheel {

namespace py = pybind11;

// The bytes of a contiguous CPU tensor, or of an object with the buffer protocol (bytes, memoryview, numpy), while it
// lives.
class ByteSpan {
 public:
  ByteSpan(py::handle object, const char* name, bool is_written) {
    if (dlpack::is_tensor(object)) {
      const dlpack::Described tensor = dlpack::describe_item(object, {name});
      BW_EXPECTS(tensor.is_contiguous(), std::string(name) + " is not contiguous: " + tensor.layout_text());
      data_ = tensor.data;
      size_ = static_cast<size_t>(tensor.numel) * size_of(tensor.dtype);
      return;
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
    data_ = view_.buf;
    size_ = static_cast<size_t>(view_.len);
  }
  ~ByteSpan() { PyBuffer_Release(&view_); }  // nothing for a tensor
  ByteSpan(const ByteSpan&) = delete;
  ByteSpan& operator=(const ByteSpan&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Py_buffer view_{};
  void* data_ = nullptr;
  size_t size_ = 0;
};

inline void bind_crc32c(py::module_& m) {
  m.def(
      "crc32c",
      [](py::handle buffer, uint32_t initial) {
        const ByteSpan span(buffer, "buffer", false);
        py::gil_scoped_release unlocked;
        return crc32c(span.data(), span.size(), initial);
      },
      py::arg("buffer"), py::arg("initial") = 0);
  m.def(
      "crc32c_copy",
      [](py::handle to, py::handle from, uint32_t initial) {
        const ByteSpan target(to, "to", true);
        const ByteSpan source(from, "source", false);
        BW_EXPECTS(target.size() == source.size(),
                   "to has " + std::to_string(target.size()) + " bytes, source has " + std::to_string(source.size()));
        py::gil_scoped_release unlocked;
        return crc32c_copy(target.data(), source.data(), source.size(), initial);
      },
      py::arg("to"), py::arg("source"), py::arg("initial") = 0);
}

}  // namespace bucketwheel
