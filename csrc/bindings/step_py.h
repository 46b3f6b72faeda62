// A step of the sharded optimizer, bucket by bucket, in one call: the rows are updated, and their all-gather is started.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace bucketwheel {

namespace py = pybind11;

class StepBuckets {
 public:
  // `params`: that have a part in the bucket. `gather`: a Request.
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
      running.append(py::make_tuple(bucket.gather.attr("start")(), number));
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
  py::class_<StepBuckets>(m, "StepBuckets")
      .def(py::init<>())
      .def("add", &StepBuckets::add, py::arg("params"), py::arg("first_row"), py::arg("last_row"), py::arg("gather"))
      .def("run", &StepBuckets::run, py::arg("step").none(true), py::arg("begun"), py::arg("order"), py::arg("used"),
           py::arg("running"));
}

}  // namespace bucketwheel
