// base/error.h in Python: every C++ error becomes the class of the same name in bucketwheel.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "base/error.h"

namespace bucketwheel {

namespace py = pybind11;

inline py::object error_class(const char* name) { return py::module_::import("bucketwheel.errors").attr(name); }

inline void set_error(const char* name, const std::exception& error) {
  PyErr_SetString(error_class(name).ptr(), error.what());
}

// Most derived first.
inline void translate_error(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PeerError& error) {
    const py::object type = error_class("PeerError");
    PyErr_SetObject(type.ptr(), type(error.what(), error.rank).ptr());
  } catch (const CommTimeout& error) {
    set_error("CommTimeout", error);
  } catch (const MismatchError& error) {
    set_error("MismatchError", error);
  } catch (const ClosedError& error) {
    set_error("ClosedError", error);
  } catch (const CommError& error) {
    set_error("CommError", error);
  } catch (const ReleasedTwice& error) {
    set_error("ReleasedTwice", error);
  } catch (const UseAfterRelease& error) {
    set_error("UseAfterRelease", error);
  } catch (const LeaseLeak& error) {
    set_error("LeaseLeak", error);
  } catch (const KeyBusy& error) {
    set_error("KeyBusy", error);
  } catch (const PoolError& error) {
    set_error("PoolError", error);
  } catch (const CaptureError& error) {
    set_error("CaptureError", error);
  } catch (const DeviceError& error) {
    set_error("DeviceError", error);
  } catch (const Error& error) {
    set_error("Error", error);
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

inline void bind_error(py::module_&) {
  // Everything else goes on to pybind11's own translators. Local: no other module of the process is affected.
  py::register_local_exception_translator(translate_error);
}

}  // namespace bucketwheel
