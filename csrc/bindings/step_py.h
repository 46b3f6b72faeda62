// A step of the sharded optimizer, bucket by bucket, in one call: the rows are updated, and their all-gather is started.
// And what it asks of all parameters at once.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/grad_table_py.h"

namespace bucketwheel {

namespace py = pybind11;

// Whether both are lists of the same objects in the same order. A comparison in Python would ask tensors whether they are
// equal, or take ten times as long.
inline bool are_same_objects(py::handle a, py::handle b) {
  if (!PyList_Check(a.ptr()) || !PyList_Check(b.ptr()) || PyList_GET_SIZE(a.ptr()) != PyList_GET_SIZE(b.ptr())) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a.ptr()); ++i) {
    if (PyList_GET_ITEM(a.ptr(), i) != PyList_GET_ITEM(b.ptr(), i)) {
      return false;
    }
  }
  return true;
}

// Where tensors lie, as uint64; 0: in no memory.
inline py::bytes addresses_of(const py::list& tensors) {
  std::vector<uint64_t> out;
  out.reserve(tensors.size());
  for (const py::handle tensor : tensors) {
    dlpack::TensorAbi found;
    const bool has_memory = dlpack::look_at(tensor, &found, false);
    out.push_back(has_memory ? reinterpret_cast<uintptr_t>(found.data) + found.byte_offset : 0);
  }
  return bytes_of(out);
}

class StepBuckets {
 public:
  // `params`: that have a part in the bucket. `gather`: a Request; None: its parameters are gathered elsewhere.
  void add(std::vector<size_t> params, int64_t first_row, int64_t last_row, py::object gather) {
    buckets_.push_back({std::move(params), first_row, last_row, std::move(gather)});
  }
  // In `order` the buckets with a parameter of `used` (flags). `step`: a table's, with the first arguments `begun`; None: only
  // gathers. Appends their handles, with the buckets, to `running`, also where a later one fails.
  void run(const py::object& step, const py::tuple& begun, const std::vector<size_t>& order, std::string_view used,
           py::list running) const {
    for (const size_t number : order) {
      const Bucket& bucket = buckets_.at(number);
      if (std::ranges::none_of(bucket.params, [used](size_t param) { return used.at(param) != 0; })) {
        continue;
      }
      if (!step.is_none()) {
        step(*begun, bucket.first_row, bucket.last_row);
      }
      if (!bucket.gather.is_none()) {
        running.append(py::make_tuple(bucket.gather.attr("start")(), number));
      }
    }
  }

 private:
  struct Bucket {
    std::vector<size_t> params;
    int64_t first_row, last_row;
    py::object gather;
  };
  std::vector<Bucket> buckets_;
};

inline void bind_step(py::module_& m) {
  m.def("are_same_objects", &are_same_objects, py::arg("a"), py::arg("b"));
  m.def("addresses", &addresses_of, py::arg("tensors"));
  py::class_<StepBuckets>(m, "StepBuckets")
      .def(py::init<>())
      .def("add", &StepBuckets::add, py::arg("params"), py::arg("first_row"), py::arg("last_row"),
           py::arg("gather").none(true))
      .def("run", &StepBuckets::run, py::arg("step").none(true), py::arg("begun"), py::arg("order"), py::arg("used"),
           py::arg("running"));
}

}  // namespace bucketwheel
