// Bindings of window/grad_table.h. Flags and states are bytes, one for each parameter; factors are doubles, as bytes.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "window/grad_table.h"

namespace bucketwheel {

namespace py = pybind11;

template <typename T>
py::bytes bytes_of(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
auto property_of(std::vector<T> GradTable::* field) {
  return std::pair{[field](const GradTable& self) { return bytes_of(self.*field); },
                   [field](GradTable& self, std::string_view bytes) {
                     BW_EXPECTS(bytes.size() == (self.*field).size() * sizeof(T), "the values have another size");
                     std::memcpy((self.*field).data(), bytes.data(), bytes.size());
                   }};
}

// For profilers: that a bucket's reduction has been started.
inline void label_reduction(int bucket, bool, int64_t) {
  static PyObject* const module =
      py::module_::import("torch.autograd.profiler").release().ptr();  // lives as long as the process
  const py::handle profiler(module);
  if (profiler.attr("_is_profiler_enabled").ptr() == Py_True) {
    const py::object label = profiler.attr("record_function")("bucketwheel.reduce bucket " + std::to_string(bucket));
    label.attr("__enter__")();
    label.attr("__exit__")(py::none(), py::none(), py::none());
  }
}

inline void bind_grad_table(py::module_& m) {
  const auto sums = property_of(&GradTable::sums);
  const auto factors = property_of(&GradTable::factors);
  const auto entries = property_of(&GradTable::entries);
  py::class_<GradTable, std::shared_ptr<GradTable>>(m, "GradTable")
      .def(py::init([](int device, size_t count) { return std::make_shared<GradTable>(device_at(device), count); }),
           py::arg("device"), py::arg("count"))
      .def(
          "set_pieces",
          [](GradTable& self, int param, const py::sequence& pieces) {
            for (const py::handle piece : pieces) {
              const dlpack::Described tensor = dlpack::describe(piece);
              self.pieces.at(GradTable::at(param))
                  .push_back({tensor.data, static_cast<size_t>(tensor.numel) * size_of(tensor.dtype)});
            }
          },
          py::arg("param"), py::arg("pieces"))
      .def(
          "carry_over",
          [](GradTable& self, const GradTable& old, const std::vector<int>& indices) { self.carry_over(old, indices); },
          py::arg("old"), py::arg("indices"))
      .def_readonly("version", &GradTable::version)
      .def_property("sums", sums.first, sums.second)
      .def_property("factors", factors.first, factors.second)
      .def_property("entries", entries.first, entries.second)
      .def_readwrite("may_be_replayed", &GradTable::may_be_replayed)
      .def("has_sum", &GradTable::has_sum, py::arg("param"))
      .def("mark_edited", &GradTable::mark_edited, py::arg("param"))
      // Parameters whose sums of squares have to be made again; `clears`: they are.
      .def(
          "edited",
          [](GradTable& self, bool clears) {
            std::vector<size_t> found;
            for (size_t i = 0; i < self.sums.size(); ++i) {
              if (self.edited[i] != 0 && self.sums[i] != 0) {
                found.push_back(i);
              }
            }
            if (clears) {
              self.edited.assign(self.edited.size(), 0);
            }
            return found;
          },
          py::arg("clears"))
      .def("set_factor", &GradTable::set_factor, py::arg("param"), py::arg("factor"))
      // Multiplies factors; or, without a number, notes that their entries were multiplied.
      .def(
          "scale",
          [](GradTable& self, const std::vector<size_t>& params, std::optional<double> factor) {
            for (const size_t param : params) {
              if (factor) {
                self.factors.at(param) *= *factor;
              } else {
                self.entries.at(param) = EntryState::kScaled;
              }
            }
          },
          py::arg("params"), py::arg("factor"));
}

}  // namespace bucketwheel
