// Bindings of plan/placement.h. A key is (size_bytes, [(start, stop), ...]).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "plan/placement.h"

namespace bucketwheel {

namespace py = pybind11;

inline void bind_placement(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Placement>(m, "Placement")
      .def_readonly("offsets", &Placement::offsets)
      .def_readonly("total_bytes", &Placement::total_bytes)
      .def_readonly("load_bytes", &Placement::load_bytes)
      .def_readonly("bound_bytes", &Placement::bound_bytes);
  m.def("place", &place, py::arg("keys"), py::arg("effort"), Unlocked());
  m.def("place_best_fit", &place_best_fit, py::arg("keys"), Unlocked());
}

}  // namespace bucketwheel
