// Bindings of plan/schedule.h. Flags and notes are bytes, one for each parameter; factors are doubles, as bytes.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "plan/schedule.h"

namespace bucketwheel {

namespace py = pybind11;

inline std::vector<double> doubles_of(std::string_view bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

template <typename T>
py::bytes bytes_of(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

inline void expect_param(const Schedule& schedule, int param) {
  BW_EXPECTS(param >= 0 && param < schedule.param_count(),
             "parameter " + std::to_string(param) + " of " + std::to_string(schedule.param_count()));
}

// One flag for each parameter, or none.
inline Flags flags_of(const Schedule& schedule, std::string_view bytes) {
  const size_t count = static_cast<size_t>(schedule.param_count());
  BW_EXPECTS(bytes.empty() || bytes.size() == count,
             std::to_string(bytes.size()) + " flags for " + std::to_string(count) + " parameters");
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

inline std::vector<double> factors_of(const Schedule& schedule, std::string_view bytes) {
  BW_EXPECTS(
      bytes.empty() || bytes.size() == sizeof(double) * static_cast<size_t>(schedule.param_count()),
      std::to_string(bytes.size()) + " bytes of factors for " + std::to_string(schedule.param_count()) + " parameters");
  return doubles_of(bytes);
}

inline void bind_agreement(py::module_& m) {
  py::class_<StoreAction>(m, "Store")
      .def(py::init<int, int, bool, bool>(), py::arg("param"), py::arg("bucket"), py::arg("late"), py::arg("add"))
      .def_readonly("param", &StoreAction::param)
      .def_readonly("bucket", &StoreAction::bucket)
      .def_readonly("late", &StoreAction::late)
      .def_readonly("add", &StoreAction::add)
      .def("__eq__", [](const StoreAction& a, const StoreAction& b) { return a == b; });
  py::class_<LaunchAction>(m, "Launch")
      .def(py::init<int, std::vector<int>, bool>(), py::arg("bucket"), py::arg("absent") = std::vector<int>{},
           py::arg("late") = false)
      .def_readonly("bucket", &LaunchAction::bucket)
      .def_readonly("absent", &LaunchAction::absent)
      .def_readonly("late", &LaunchAction::late)
      .def("__eq__", [](const LaunchAction& a, const LaunchAction& b) { return a == b; });
  py::class_<Agreement>(m, "Agreement")
      .def_readonly("is_dirty", &Agreement::is_dirty)
      .def_readonly("is_complete", &Agreement::is_complete)
      .def_readonly("is_uneven", &Agreement::is_uneven)
      .def_property_readonly("held", [](const Agreement& self) { return bytes_of(self.held); })
      .def_readonly("void", &Agreement::voided)
      .def_readonly("late", &Agreement::late)
      .def_readonly("conflicts", &Agreement::conflicts)
      .def_readonly("scaled_apart", &Agreement::scaled_apart)
      .def_property_readonly("factors", [](const Agreement& self) { return bytes_of(self.factors); })
      .def("__eq__", [](const Agreement& a, const Agreement& b) { return a == b; });
}

template <bool (Schedule::*kQuestion)(int) const>
bool ask_of_param(const Schedule& self, int param) {
  expect_param(self, param);
  return (self.*kQuestion)(param);
}

inline void bind_schedule(py::module_& m) {
  bind_agreement(m);
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def(py::init<std::vector<std::vector<int>>, int, bool>(), py::arg("buckets_of"), py::arg("bucket_count"),
           py::arg("is_static") = false)
      .def(
          "gradient",
          [](Schedule& self, int param, bool replaces, bool launch) {
            expect_param(self, param);
            Actions actions = self.gradient(param, replaces, launch);
            return py::make_tuple(std::move(actions.stores), std::move(actions.launches));
          },
          py::arg("param"), py::arg("replaces") = false, py::arg("launch") = true)
      .def("ready", &Schedule::ready)
      .def(
          "complete",
          [](Schedule& self, const std::vector<int>& params) {
            for (const int param : params) {
              expect_param(self, param);
            }
            return self.complete(params);
          },
          py::arg("params"))
      .def("flush", &Schedule::flush)
      .def("discard", &Schedule::discard)
      .def("forget_window", &Schedule::forget_window)
      .def(
          "drops", [](const Schedule& self, std::string_view held) { return self.drops(flags_of(self, held)); },
          py::arg("held"))
      .def("has_stored", &ask_of_param<&Schedule::has_stored>, py::arg("param"))
      .def_property_readonly("is_dirty", &Schedule::is_dirty)
      .def_property_readonly("window", &Schedule::window)
      .def(
          "notes",
          [](const Schedule& self, std::string_view held, std::string_view older, std::string_view factors) {
            return bytes_of(self.notes(flags_of(self, held), flags_of(self, older), factors_of(self, factors)));
          },
          py::arg("held"), py::arg("older") = "", py::arg("factors") = "")
      .def(
          "agree", [](const Schedule& self, const std::vector<std::string_view>& notes) { return self.agree(notes); },
          py::arg("notes"))
      .def(
          "close",
          [](Schedule& self, const Agreement& agreement) {
            std::vector<LaunchAction> first, late;
            self.close(agreement, &first, &late);
            return py::make_tuple(std::move(first), std::move(late));
          },
          py::arg("agreement"))
      .def_property_readonly("is_learnt", &Schedule::is_learnt)
      .def("is_private", &ask_of_param<&Schedule::is_private>, py::arg("param"))
      .def(
          "assume",
          [](const Schedule& self, std::string_view held, std::string_view older, std::string_view factors) {
            return self.assume(flags_of(self, held), flags_of(self, older), factors_of(self, factors));
          },
          py::arg("held"), py::arg("older") = "", py::arg("factors") = "")
      .def("is_deviation", &ask_of_param<&Schedule::is_deviation>, py::arg("param"))
      .def(
          "find_deviation",
          [](const Schedule& self, std::string_view held) { return self.find_deviation(flags_of(self, held)); },
          py::arg("held"));
}

}  // namespace bucketwheel
