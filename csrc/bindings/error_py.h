// base/error.h in Python: every C++ error becomes the class of the same name in bucketwheel.errors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"

namespace bucketwheel {

namespace py = pybind11;

inline py::object error_class(const char* name) { return py::module_::import("bucketwheel.errors").attr(name); }

inline void set_error(const char* name, const std::exception& error) {
  PyErr_SetString(error_class(name).ptr(), error.what());
}

// What a peer told may have been cut in the middle of a character.
inline py::str text_of_bytes(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

inline py::object nccl_code_of(int code) { return code == 0 ? py::object(py::none()) : py::object(py::int_(code)); }

inline void set_comm_error(const char* name, const CommError& error) {
  const CommFacts& facts = error.facts;
  py::dict attributes;
  attributes["op"] = facts.op;
  attributes["seq"] = facts.seq;
  attributes["rank"] = facts.rank;
  attributes["nccl_code"] = nccl_code_of(facts.nccl_code);
  attributes["last_error"] = text_of_bytes(facts.last_error);
  attributes["reason"] = text_of_bytes(facts.reason);
  if (dynamic_cast<const CommTimeout*>(&error) != nullptr) {
    attributes["last_seqs"] = facts.last_seqs;
  }
  const py::object type = error_class(name);
  try {
    PyErr_SetObject(type.ptr(), type(text_of_bytes(error.what()), **attributes).ptr());
  } catch (py::error_already_set& interrupt) {  // a signal's handler ran in there, as on Ctrl-C
    interrupt.restore();
  }
}

// Most derived first.
inline void translate_error(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const PeerError& error) {
    set_comm_error("PeerError", error);
  } catch (const CommTimeout& error) {
    set_comm_error("CommTimeout", error);
  } catch (const MismatchError& error) {
    set_comm_error("MismatchError", error);
  } catch (const ClosedError& error) {
    set_comm_error("ClosedError", error);
  } catch (const CommError& error) {
    set_comm_error("CommError", error);
  } catch (const ReleasedTwice& error) {
    set_error("ReleasedTwice", error);
  } catch (const UseAfterRelease& error) {
    set_error("UseAfterRelease", error);
  } catch (const LeaseLeak& error) {
    set_error("LeaseLeak", error);
  } catch (const KeyBusy& error) {
    set_error("KeyBusy", error);
  } catch (const PoolBusy& error) {
    set_error("PoolBusy", error);
  } catch (const UnknownKey& error) {
    set_error("UnknownKey", error);
  } catch (const SizeExceedsPlan& error) {
    set_error("SizeExceedsPlan", error);
  } catch (const PlanDiverged& error) {
    set_error("PlanDiverged", error);
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
