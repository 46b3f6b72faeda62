// Bindings of device/: Stream and Event, and the CUDA table.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "bindings/dlpack.h"
#include "device/device.h"
#include "device/device_cuda.h"

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

// In Python a device is a number: the index of a CUDA device, -1 for the CPU.
inline Device& device_at(int index) { return index < 0 ? cpu_device() : static_cast<Device&>(CudaDevice::at(index)); }
inline int index_of(DeviceId device) { return device.kind == DeviceId::Kind::kCpu ? -1 : device.index; }

// What the caller's work is enqueued in: torch's current stream of a CUDA device; null, the calling thread, on the CPU.
inline StreamRef current_stream(DeviceId device) {
  if (device.kind == DeviceId::Kind::kCpu) {
    return nullptr;
  }
  return CudaDevice::at(device.index).borrow(dlpack::current_cuda_stream(device.index));
}

// Writes bytes of the host into a contiguous tensor on a CUDA device; never blocks.
inline void upload_bytes(py::handle to, std::string_view values) {
  const dlpack::Described tensor = dlpack::describe(to);
  BW_EXPECTS(tensor.device.kind == DeviceId::Kind::kCuda && tensor.is_contiguous() &&
                 static_cast<size_t>(tensor.numel) * size_of(tensor.dtype) == values.size(),
             "to must be a contiguous tensor of " + std::to_string(values.size()) +
                 " bytes on a CUDA device; it has shape " + tensor.shape_text());
  const StreamRef stream = current_stream(tensor.device);
  py::gil_scoped_release unlocked;
  CudaDevice::at(tensor.device.index).upload(tensor.data, values.data(), values.size(), *stream);
}

inline void bind_cuda(py::module_& m) {
  m.def("upload", &upload_bytes, py::arg("to"), py::arg("values"));
  m.def(
      "install_cuda",
      [](const py::capsule& api) {
        BW_EXPECTS(api.name() != nullptr && std::string(api.name()) == kCudaApiCapsule, "not a CUDA table");
        install_cuda_api(api.get_pointer<const CudaApi>());
        api.inc_ref();  // for ever: a static object would be freed after the end of Python
      },
      py::arg("api"));
  m.def("has_cuda", &has_cuda_api);
  m.def(
      "set_cuda_reclaim",
      [](py::function reclaim) {
        auto* const function = new py::function(std::move(reclaim));  // lives as long as the process
        set_cuda_reclaim([function](int device) {
          py::gil_scoped_acquire locked;
          return (*function)(device).cast<std::string>();
        });
      },
      py::arg("reclaim"));
  m.def("set_posing", &set_posing, py::arg("poses"));
  m.def("is_posing", &is_posing);
  m.def(
      "set_posed_stream", [](uintptr_t native) { set_posed_stream(reinterpret_cast<void*>(native)); },
      py::arg("native"));
  m.def("current_stream", [](int device) { return current_stream(device_at(device).id()); }, py::arg("device"));
  // Of the current stream; 0 and false on the CPU.
  m.def(
      "capture_id", [](int device) { return device < 0 ? 0 : capture_id(*current_stream(device_at(device).id())); },
      py::arg("device"));
  m.def(
      "is_capturing", [](int device) { return device >= 0 && is_capturing(*current_stream(device_at(device).id())); },
      py::arg("device"));
  m.def(
      "borrow_stream",
      [](uintptr_t native, int device) { return CudaDevice::at(device).borrow(reinterpret_cast<void*>(native)); },
      py::arg("native"), py::arg("device"));
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

  py::class_<Stream, StreamRef>(m, "Stream", "An ordered queue of work: a worker thread (CPU), or a CUDA stream.")
      // Not Unlocked(), which would hold for the object's entry in pybind11's table as well.
      .def(py::init([](std::string name, int device) {
             const py::gil_scoped_release unlocked;
             return device_at(device).new_stream(std::move(name));
           }),
           py::arg("name") = "stream", py::arg("device") = -1)
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
      .def(
          "fill",
          [](Stream& self, py::handle tensor, int byte) {
            const dlpack::Described to = dlpack::describe(tensor);
            BW_EXPECTS(to.is_contiguous(), "fill: the tensor of shape " + to.shape_text() + " is not contiguous");
            py::gil_scoped_release unlocked;
            device_at(index_of(to.device))
                .fill(to.data, byte, static_cast<size_t>(to.numel) * size_of(to.dtype), &self);
          },
          py::arg("tensor"), py::arg("byte"), "Enqueues the setting of every byte of a contiguous tensor.")
      .def_property_readonly(
          "cuda_stream", [](Stream& self) { return reinterpret_cast<uintptr_t>(native_stream(self, "cuda_stream")); },
          "The cudaStream_t of a CUDA stream.")
      .def("close", &Stream::close, Unlocked(),
           "Runs what is queued and ends the worker; later calls raise DeviceError. Idempotent.");
}

}  // namespace bucketwheel
