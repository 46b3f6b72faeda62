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

inline py::object class_of(const Error& error) { return py::module_::import("bucketwheel.errors").attr(error.name()); }

// What a peer told may have been cut in the middle of a character.
inline py::str text_of_bytes(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

inline py::object nccl_code_of(int code) { return code == 0 ? py::object(py::none()) : py::object(py::int_(code)); }

inline void set_comm_error(const CommError& error) {
  using py::arg;
  const CommFacts& facts = error.facts;
  py::dict attributes(arg("op") = facts.op, arg("seq") = facts.seq, arg("rank") = facts.rank,
                      arg("nccl_code") = nccl_code_of(facts.nccl_code),
                      arg("last_error") = text_of_bytes(facts.last_error), arg("reason") = text_of_bytes(facts.reason));
  if (dynamic_cast<const CommTimeout*>(&error) != nullptr) {
    attributes["last_seqs"] = facts.last_seqs;
  }
  const py::object type = class_of(error);
  try {
    PyErr_SetObject(type.ptr(), type(text_of_bytes(error.what()), **attributes).ptr());
  } catch (py::error_already_set& interrupt) {  // a signal's handler ran in there, as on Ctrl-C
    interrupt.restore();
  }
}

inline void translate_error(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const CommError& error) {
    set_comm_error(error);
  } catch (const Error& error) {
    PyErr_SetString(class_of(error).ptr(), error.what());
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
