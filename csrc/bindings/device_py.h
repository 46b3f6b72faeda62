// Bindings of device/: Stream and Event.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/error.h"
#include "device/device.h"

namespace bucketwheel {

namespace py = pybind11;

// `timeout` as Python gives it: seconds from now, or None.
inline Deadline deadline_of(std::optional<double> timeout_s) {
  if (!timeout_s) {
    return std::nullopt;
  }
  BW_EXPECTS(*timeout_s >= 0, "timeout must be at least 0 seconds, got " + std::to_string(*timeout_s));
  return deadline_in(*timeout_s);
}

// An argument that is a T or None. By hand: pybind11 takes None for a class only in its second try of all overloads,
// which costs half a microsecond per call.
template <typename T>
std::shared_ptr<T> optional_argument(py::handle object, const char* name, const char* expected) {
  if (object.is_none()) {
    return nullptr;
  }
  if (!py::isinstance<T>(object)) {
    throw TypeError(std::string(name) + " must be " + expected + " or None, got " + Py_TYPE(object.ptr())->tp_name);
  }
  return py::cast<std::shared_ptr<T>>(object);
}

inline void bind_device(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<Event, EventRef>(m, "Event", "The completion of what was in a stream when the event was recorded.")
      .def("query", &Event::query, "True when the work is done. Never blocks.")
      .def(
          "synchronize",
          [](const Event& self, std::optional<double> timeout) { return self.synchronize(deadline_of(timeout)); },
          py::arg("timeout") = py::none(), Unlocked(),
          "Blocks the calling thread until the work is done; False when ``timeout`` seconds passed first.")
      .def("elapsed_s", &Event::elapsed_s, py::arg("start"),
           "Seconds from ``start`` to this event. Both recorded with ``timing=True`` and complete, else ValueError.");

  py::class_<Stream, StreamRef>(m, "Stream", "An ordered queue of work with its own worker thread (CPU).")
      .def(py::init([](std::string name) { return cpu_device().new_stream(std::move(name)); }),
           py::arg("name") = "stream", Unlocked())
      .def("record", &Stream::record, py::arg("timing") = false, Unlocked(),
           "An Event that completes when everything enqueued so far has run.")
      .def("wait", &Stream::wait, py::arg("event").none(false), Unlocked(),
           "What is enqueued from now on runs after ``event``. Does not block the caller.")
      .def(
          "synchronize",
          [](Stream& self, std::optional<double> timeout) { return self.synchronize(deadline_of(timeout)); },
          py::arg("timeout") = py::none(), Unlocked(),
          "Blocks the calling thread until the queue is empty; False when ``timeout`` seconds passed first.")
      .def(
          "pause",
          [](Stream& self, double seconds) {
            self.run([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
          },
          py::arg("seconds"), Unlocked(), "Enqueues a pause: work that takes a known time, to see what waits for what.")
      .def("close", &Stream::close, Unlocked(),
           "Runs what is queued and ends the worker; later calls raise DeviceError. Idempotent.");
}

}  // namespace bucketwheel
