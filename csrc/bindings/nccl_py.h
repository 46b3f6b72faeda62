// Bindings of comm/nccl/api.h and comm/nccl/comm.h: which NCCL there is, and communicators over it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/comm_py.h"
#include "bindings/device_py.h"
#include "bindings/error_py.h"
#include "bindings/peers_py.h"
#include "comm/nccl/api.h"
#include "comm/nccl/comm.h"
#include "comm/reaper.h"

namespace bucketwheel {

namespace py = pybind11;

inline py::dict nccl_info() {
  const NcclApi* api = nullptr;
  {
    py::gil_scoped_release unlocked;  // the first call reads a large file
    api = &nccl_api();
  }
  using py::arg;
  const py::dict features(arg("windows") = api->features.windows, arg("zero_cta") = api->features.zero_cta,
                          arg("symmetric_avg") = api->features.symmetric_avg);
  return py::dict(arg("path") = api->path, arg("found") = api->found, arg("version") = api->version,
                  arg("features") = features);
}

inline py::bytes nccl_unique_id() {
  NcclUniqueId id{};
  {
    py::gil_scoped_release unlocked;  // opens a socket
    BW_NCCL_TRY(nccl_api(), get_unique_id, &id);
  }
  return py::bytes(id.internal, sizeof(id.internal));
}

inline NcclUniqueId unique_id_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  NcclUniqueId id{};
  BW_EXPECTS(view.size() == sizeof(id.internal), "the unique id has " + std::to_string(view.size()) + " bytes");
  view.copy(id.internal, view.size());
  return id;
}

inline NcclOptions nccl_options(std::optional<int> max_ctas, std::optional<int> cta_policy, bool registers_memory,
                                PoolRef pool, bool serialises) {
  NcclOptions options;
  options.config.max_ctas = max_ctas.value_or(kNcclUndefined);
  options.config.cta_policy = cta_policy.value_or(kNcclUndefined);
  options.registers_memory = registers_memory;
  options.pool = std::move(pool);
  options.serialises = serialises;
  options.poll = check_signals;
  return options;
}

// `check` is called as NcclOptions::check, with the GIL.
inline void set_check(NcclOptions& options, const py::object& check) {
  options.check = [function = held_function(check)](const std::string& comm, uint64_t seq, const std::string& text) {
    const py::gil_scoped_acquire locked;
    return (*function)(comm, seq, text).cast<std::string>();
  };
}

inline Deadline deadline_after(double timeout_s) { return Clock::now() + expect_timeout(timeout_s); }

// make(peers, device, unique id, options, deadline) as Python calls it.
template <class Make>
auto nccl_maker(Make make) {
  return [make](const PeersRef& peers, int device, const py::bytes& id, const NcclOptions& options, double timeout_s) {
    const NcclUniqueId unique_id = unique_id_of(id);
    const Deadline deadline = deadline_after(timeout_s);
    const py::gil_scoped_release unlocked;
    return make(peers, device, unique_id, options, deadline);
  };
}

inline void bind_nccl(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("set_nccl_folders", &set_nccl_folders, py::arg("folders"));
  m.def("nccl_info", &nccl_info);
  m.def("nccl_unique_id", &nccl_unique_id);
  m.def("stop_freeing", [] {
    {
      const py::gil_scoped_release unlocked;
      stop_freeing();
    }
    PendingDecrefs::all().drop();
    PendingDecrefs::all().stop();
  });
  py::class_<NcclOptions>(m, "NcclOptions")
      .def(py::init(&nccl_options), py::arg("max_ctas").none(true), py::arg("cta_policy").none(true),
           py::arg("registers_memory"), py::arg("pool"), py::arg("serialises"))
      .def("set_check", &set_check, py::arg("check"));
  py::class_<NcclComm, Comm, NcclComm::Ref>(m, "NcclComm")
      .def_property_readonly("has_windows", py::cpp_function(&NcclComm::has_windows, Unlocked()))
      .def("register_pool", &NcclComm::register_pool, Unlocked())
      .def(
          "split",
          [](NcclComm& self, const PeersRef& peers, int color, int key, const NcclOptions& options, double timeout_s) {
            return released_without_gil(self.split(peers, color, key, options, deadline_after(timeout_s)));
          },
          py::arg("peers").none(true), py::arg("color"), py::arg("key"), py::arg("options"), py::arg("timeout_s"),
          Unlocked());
  m.def("make_nccl_comm",
        nccl_maker([](const auto&... arguments) { return released_without_gil(NcclComm::make(arguments...)); }),
        py::arg("peers"), py::arg("device"), py::arg("id"), py::arg("options"), py::arg("timeout_s"));
  m.def("make_nccl_pair", nccl_maker([](const auto&... arguments) {
          auto [gathers, reduces] = NcclComm::pair(arguments...);
          return std::pair(released_without_gil(std::move(gathers)), released_without_gil(std::move(reduces)));
        }),
        py::arg("peers"), py::arg("device"), py::arg("id"), py::arg("options"), py::arg("timeout_s"));
}

}  // namespace bucketwheel
