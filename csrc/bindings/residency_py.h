// The parameters of units, which are here while they are needed: window/units.h gathers, this makes torch's parameters of it.
//
// A parameter that is here is a torch Parameter whose `.data` is a view of the unit's memory, into which the all-gather has
// written: no copy. One that is not is of the class AbsentParam (bucketwheel/residency/absent_param.py), without memory.
// Views, and the checked gather, are made once for each place. Python's module hooks call forward(), forward_end() and
// backward() at a boundary, once each.
//
// [Note: addresses of parameters] What autograd saves of a weight is a view of its memory, which nobody redirects. So a unit
// must have the same address in its forward and in its backward. A planned place keeps it. Memory on the side (in the first
// step, and where a step leaves the plan) does not: there forward() asks for hooks of saved tensors, which name the weight
// instead of its memory. backward() compares.
//
// [Note: gathers that are agreed on] As long as there is no record, each gather is agreed on before, host to host: a unit that
// some ranks need and others do not is an error on all of them. Later gathers carry the unit's number, so that the
// communicator finds ranks that gather others. When a window of gradients closes, each rank gathers the hash of its events,
// which meets the gather that another rank may be waiting for; the step compares.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/comm_py.h"
#include "bindings/dlpack.h"
#include "bindings/pool_py.h"
#include "bindings/window_py.h"
#include "plan/residency.h"
#include "window/units.h"

namespace bucketwheel {

namespace py = pybind11;

class PyResidency {
 public:
  using Kind = ResidencyEvent::Kind;
  // Name, bytes, parameters, and what each parameter's `.data` is while it is absent.
  using GivenUnit = std::tuple<std::string, size_t, std::vector<py::object>, std::vector<py::object>>;

  // `here`, `absent`: classes of parameters. `bind(unit, memory)` gives views of the unit's parameters in memory (uint8), and
  // its gather. `agree(unit, what)` raises on all ranks unless all call it alike.
  PyResidency(const CommRef& comm, const std::vector<GivenUnit>& units, const std::vector<uint8_t>& stays, int prefetch,
              py::object here, py::object absent, py::object bind, py::object agree)
      : device_(comm->device()),
        stays_(stays),
        prefetch_(prefetch),
        here_(std::move(here)),
        absent_(std::move(absent)),
        bind_(std::move(bind)),
        agree_(std::move(agree)) {
    std::vector<UnitSpec> specs;
    for (const auto& [name, size_bytes, params, blanks] : units) {
      specs.push_back({name, size_bytes});
      params_.push_back({params, blanks, {}, {}});
    }
    UnitCallbacks callbacks{[this](int unit, std::byte* data, const std::shared_ptr<void>& owner) {
                              return bound(unit, data, owner).gather;
                            },
                            [this](int unit, bool is_here) { assign(unit, is_here); },
                            [this](int unit, const char* what) { agree_(unit, what); }, run_aside};
    units_ = std::make_unique<Units>(comm, std::move(specs), stays, prefetch, std::move(callbacks));
    set_plan({"units", {}, {}, 0, 0}, {});
  }

  void set_plan(PoolPlan plan, std::vector<int> numbers) {
    for (Params& params : params_) {
      params.places.clear();
    }
    units_->set_plan(std::move(plan), std::move(numbers), stream());
  }

  // Whether what autograd saves must be named by hooks.
  bool forward(int unit, bool keeps, bool in_backward) {
    units_->step({Kind::kForward, unit, in_backward, keeps}, stream());
    return keeps && !in_backward && units_->turn(unit).place == nullptr;
  }
  // `storages`: where those of the outputs begin. None, and nothing is done: one is the memory of parameters. Else what
  // backward() must get: the address of the unit, 0 if any will do, the regime, and the address of the root, -1 if it has none.
  py::object forward_end(int unit, bool keeps, bool in_backward, bool pins, const std::vector<uintptr_t>& storages) {
    for (const uintptr_t storage : storages) {
      if (unit_at_address(storage) >= 0) {
        return py::none();
      }
    }
    const uintptr_t place = address(unit);
    const int64_t root = units_->turn(0) ? static_cast<int64_t>(address(0)) : -1;
    const int regime = machine().regime();
    units_->step({Kind::kForwardEnd, unit, in_backward, keeps, pins}, stream());
    return py::make_tuple(place, regime, root);
  }
  // Of a unit that is gathered in its planned place; 0: it is not, or elsewhere.
  uintptr_t address(int unit) const {
    const Turn& turn = units_->turn(unit);
    return turn.place == nullptr ? 0 : reinterpret_cast<uintptr_t>(turn.data);
  }
  bool backward(int unit, uintptr_t address, int64_t root) {
    const bool has_root = root < 0 || machine().is_here(0) || backward(0, static_cast<uintptr_t>(root), -1);
    if (!machine().is_spent(unit)) {  // else by another output
      units_->step({Kind::kBackward, unit, true, false}, stream());
    }
    return has_root && (address == 0 || address == reinterpret_cast<uintptr_t>(units_->turn(unit).data));
  }
  void backward_end() { units_->step({Kind::kBackwardEnd, 0, true, false}, stream()); }
  bool end_step() { return units_->end_step(stream()); }
  HandleRef hold(int unit, py::handle in) {
    return units_->hold(unit, stream(), optional_argument<Stream>(in, "stream", "a Stream"));
  }
  void let_go(int unit, bool keeps) { units_->let_go(unit, keeps, stream()); }
  void wait(int unit) { units_->wait(unit, stream()); }

  // The unit whose memory is a storage that begins at `address`; -1: none.
  int unit_at_address(uintptr_t address) const {
    for (int unit = 0; unit < units_->count(); ++unit) {
      const Turn& turn = units_->turn(unit);
      if (turn && reinterpret_cast<uintptr_t>(turn.data) == address) {
        return unit;
      }
    }
    return -1;
  }
  // The memory of a unit that is gathered; None: it is not.
  py::object memory(int unit) {
    const Turn& turn = units_->turn(unit);
    return turn ? params_.at(static_cast<size_t>(unit)).places.at(turn.data).memory : py::object(py::none());
  }
  Residency& machine() { return units_->machine(); }
  // A parameter that was written to while it was here, once; None: there is none. `expected`: writes to the unit so far count.
  py::object take_written() { return std::exchange(written_, py::none()); }
  void expect_written(int unit) { params_.at(static_cast<size_t>(unit)).versions.clear(); }
  // By unit, in seconds: how long the host has waited for its gathers.
  std::vector<double> waited_s() const {
    std::vector<double> out;
    for (int unit = 0; unit < units_->count(); ++unit) {
      out.push_back(units_->waited_s(unit));
    }
    return out;
  }
  py::dict memory_counts() const {
    using py::arg;
    const Places& places = units_->places();
    return py::dict(arg("planned") = places.planned_bytes(), arg("load") = places.load_bytes(),
                    arg("live") = places.live_bytes(), arg("peak") = places.peak_bytes(),
                    arg("side") = places.side_bytes(), arg("side_peak") = places.side_peak_bytes(),
                    arg("wasted") = units_->wasted_bytes());
  }
  // The half-open intervals of events in which units have memory, by the record of a regime.
  std::vector<std::vector<std::pair<int, int>>> intervals(int regime) {
    return residency_intervals(stays_, prefetch_, machine().record(regime));
  }
  std::vector<std::pair<int, int>> record(int regime) {
    std::vector<std::pair<int, int>> out;
    for (const ResidencyEvent& event : machine().record(regime)) {
      out.emplace_back(static_cast<int>(event.kind), event.unit);
    }
    return out;
  }

 private:
  struct BoundPlace {
    py::object memory;
    std::vector<py::object> views;
    std::shared_ptr<Request> gather;
  };
  struct Params {
    std::vector<py::object> params, blanks;
    std::vector<py::object> versions;                   // of the parameters when they came
    std::unordered_map<std::byte*, BoundPlace> places;  // by address; until the next plan
  };
  static constexpr size_t kMostPlaces = 16;  // of a unit: those on the side are new again and again

  StreamRef stream() const { return current_stream(device_); }

  BoundPlace& bound(int unit, std::byte* data, const std::shared_ptr<void>& owner) {
    auto& places = params_.at(static_cast<size_t>(unit)).places;
    const auto found = places.find(data);
    if (found != places.end()) {
      return found->second;
    }
    if (places.size() >= kMostPlaces) {
      places.clear();
    }
    BoundPlace place;
    const auto size_bytes = static_cast<int64_t>(units_->turn(unit).size_bytes);
    place.memory = dlpack::make_tensor(data, DType::kUInt8, {size_bytes}, device_, owner);
    const py::tuple made = bind_(unit, place.memory);
    place.views = made[0].cast<std::vector<py::object>>();
    place.gather = made[1].cast<std::shared_ptr<Request>>();
    return places.emplace(data, std::move(place)).first->second;
  }

  void assign(int unit, bool is_here) {
    static PyObject* const class_name = PyUnicode_InternFromString("__class__");
    static PyObject* const data_name = PyUnicode_InternFromString("data");
    static PyObject* const version_name = PyUnicode_InternFromString("_version");
    Params& one = params_.at(static_cast<size_t>(unit));
    one.versions.resize(one.params.size());
    const std::vector<py::object>& data = is_here ? one.places.at(units_->turn(unit).data).views : one.blanks;
    for (size_t i = 0; i < one.params.size(); ++i) {
      PyObject* const param = one.params[i].ptr();
      if (!is_here && one.versions[i] && !one.versions[i].equal(one.params[i].attr(version_name))) {
        written_ = one.params[i];
      }
      const bool is_plain = Py_TYPE(param) == reinterpret_cast<PyTypeObject*>(here_.ptr());
      if ((!is_plain && PyObject_SetAttr(param, class_name, here_.ptr()) != 0) ||
          PyObject_SetAttr(param, data_name, data[i].ptr()) != 0 ||
          (!is_here && PyObject_SetAttr(param, class_name, absent_.ptr()) != 0)) {
        throw py::error_already_set();
      }
      one.versions[i] = is_here ? py::object(one.params[i].attr(version_name)) : py::object();
    }
  }

  const DeviceId device_;
  const std::vector<uint8_t> stays_;
  const int prefetch_;
  const py::object here_, absent_, bind_, agree_;
  std::vector<Params> params_;
  py::object written_ = py::none();
  std::unique_ptr<Units> units_;
};

inline void bind_residency(py::module_& m) {
  using py::arg;
  py::class_<PyResidency>(m, "Residency")
      .def(py::init<const CommRef&, const std::vector<PyResidency::GivenUnit>&, const std::vector<uint8_t>&, int,
                    py::object, py::object, py::object, py::object>(),
           arg("comm"), arg("units"), arg("stays"), arg("prefetch"), arg("here"), arg("absent"), arg("bind"),
           arg("agree"))
      .def(
          "set_plan",
          [](PyResidency& self, const GivenPlan& plan, std::vector<int> numbers) {
            self.set_plan(plan_of(plan), std::move(numbers));
          },
          arg("plan"), arg("numbers"))
      .def("forward", &PyResidency::forward, arg("unit"), arg("keeps"), arg("in_backward"))
      .def("forward_end", &PyResidency::forward_end, arg("unit"), arg("keeps"), arg("in_backward"), arg("pins"),
           arg("storages"))
      .def("backward", &PyResidency::backward, arg("unit"), arg("address"), arg("root"))
      .def("backward_end", &PyResidency::backward_end)
      .def("forget_events", [](PyResidency& self) { self.machine().forget_events(); })
      .def("end_step", &PyResidency::end_step)
      .def("hold", &PyResidency::hold, arg("unit"), arg("stream") = py::none())
      .def("let_go", &PyResidency::let_go, arg("unit"), arg("keeps") = false)
      .def("wait", &PyResidency::wait, arg("unit"))
      .def("take_written", &PyResidency::take_written)
      .def("expect_written", &PyResidency::expect_written, arg("unit"))
      .def("unit_at", &PyResidency::unit_at_address, arg("address"))
      .def("memory", &PyResidency::memory, arg("unit"))
      .def(
          "is_here", [](PyResidency& self, int unit) { return self.machine().is_here(unit); }, arg("unit"))
      .def(
          "is_in_flight", [](PyResidency& self, int unit) { return self.machine().is_in_flight(unit); }, arg("unit"))
      .def_property(
          "regime", [](PyResidency& self) { return self.machine().regime(); },
          [](PyResidency& self, int regime) { self.machine().set_regime(regime); })
      .def("end_pass", [](PyResidency& self) { return self.machine().end_pass(); })
      .def_property_readonly("divergences", [](PyResidency& self) { return self.machine().counts().divergences; })
      .def_property_readonly("hash", [](PyResidency& self) { return self.machine().hash(); })
      .def("intervals", &PyResidency::intervals, arg("regime"))
      .def("record", &PyResidency::record, arg("regime"))
      .def("waited_s", &PyResidency::waited_s)
      .def("memory_counts", &PyResidency::memory_counts)
      .def("counts", [](PyResidency& self) {
        const ResidencyCounts& counts = self.machine().counts();
        return py::dict(arg("wasted") = counts.wasted, arg("gathers") = counts.gathers,
                        arg("step_gathers") = counts.step_gathers);
      });
}

}  // namespace bucketwheel
