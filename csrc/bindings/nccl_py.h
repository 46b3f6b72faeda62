// Bindings of comm/nccl_api.h: which NCCL there is.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "comm/nccl_api.h"

namespace bucketwheel {

namespace py = pybind11;

inline py::dict nccl_info() {
  const NcclApi* api = nullptr;
  {
    py::gil_scoped_release unlocked;  // the first call reads a large file
    api = &nccl_api();
  }
  py::dict features;
  features["windows"] = api->features.windows;
  features["shrink"] = api->features.shrink;
  features["zero_cta"] = api->features.zero_cta;
  features["revoke"] = api->features.revoke;
  features["multi_rank_gpu"] = api->features.multi_rank_gpu;
  features["symmetric_avg"] = api->features.symmetric_avg;
  py::dict info;
  info["path"] = api->path;
  info["found"] = api->found;
  info["version"] = api->version;
  info["features"] = features;
  return info;
}

inline py::bytes nccl_unique_id() {
  NcclUniqueId id{};
  {
    py::gil_scoped_release unlocked;  // opens a socket
    BW_NCCL_TRY(nccl_api(), get_unique_id, &id);
  }
  return py::bytes(id.internal, sizeof(id.internal));
}

inline void bind_nccl(py::module_& m) {
  m.def("set_nccl_folders", &set_nccl_folders, py::arg("folders"));
  m.def("nccl_info", &nccl_info);
  m.def("nccl_unique_id", &nccl_unique_id);
  m.def("nccl_error_string", [](int code) { return std::string(nccl_api().get_error_string(code)); }, py::arg("code"));
}

}  // namespace bucketwheel
