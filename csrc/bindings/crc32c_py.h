// Bindings of kernels/crc32c.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "kernels/crc32c.h"

namespace bucketwheel {

namespace py = pybind11;

inline void bind_crc32c(py::module_& m) {
  m.def(
      "crc32c",
      [](py::handle buffer, uint32_t initial) {
        constexpr Py_ssize_t kLong = 1 << 16;  // what takes longer than other threads take to notice
        Py_buffer bytes;
        if (PyObject_GetBuffer(buffer.ptr(), &bytes, PyBUF_SIMPLE) != 0) {
          throw py::error_already_set();
        }
        const std::unique_ptr<Py_buffer, decltype(&PyBuffer_Release)> held(&bytes, PyBuffer_Release);
        std::optional<py::gil_scoped_release> unlocked;
        if (bytes.len >= kLong) {
          unlocked.emplace();
        }
        return crc32c(bytes.buf, static_cast<size_t>(bytes.len), initial);
      },
      py::arg("buffer"), py::arg("initial") = 0);
}

}  // namespace bucketwheel
