// Bindings of comm/nccl/api.h, comm_nccl.h and peers_store.h: which NCCL there is, and communicators over it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/comm_py.h"
#include "bindings/device_py.h"
#include "bindings/error_py.h"
#include "comm/host/host_comm.h"
#include "comm/nccl/api.h"
#include "comm/nccl/comm.h"
#include "comm/peers/store_peers.h"
#include "comm/reaper.h"

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
  features["zero_cta"] = api->features.zero_cta;
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

// A function of Python's for threads that do not hold the GIL; it takes it to end.
inline std::shared_ptr<const py::function> held_function(const py::object& function) {
  return {new py::function(function), [](const py::function* owned) {
            const py::gil_scoped_acquire locked;
            delete owned;
          }};
}

inline NcclUniqueId unique_id_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  NcclUniqueId id{};
  BW_EXPECTS(view.size() == sizeof(id.internal), "a unique id of " + std::to_string(view.size()) + " bytes");
  view.copy(id.internal, view.size());
  return id;
}

inline void set_config(NcclConfig& config, const std::string& name, int value) {
  const std::pair<const char*, int NcclConfig::*> fields[] = {{"blocking", &NcclConfig::blocking},
                                                              {"cga_cluster_size", &NcclConfig::cga_cluster_size},
                                                              {"min_ctas", &NcclConfig::min_ctas},
                                                              {"max_ctas", &NcclConfig::max_ctas},
                                                              {"split_share", &NcclConfig::split_share},
                                                              {"traffic_class", &NcclConfig::traffic_class},
                                                              {"collnet_enable", &NcclConfig::collnet_enable},
                                                              {"cta_policy", &NcclConfig::cta_policy}};
  std::string known;
  for (const auto& [field, member] : fields) {
    if (name == field) {
      config.*member = value;
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + field;
  }
  throw ValueError("NCCL has no option '" + name + "' that can be set here: " + known + " and net_name can");
}

inline NcclOptions nccl_options(const std::map<std::string, int>& config, std::string net_name, bool registers_memory,
                                PoolRef pool, bool serialises) {
  NcclOptions options;
  for (const auto& [name, value] : config) {
    set_config(options.config, name, value);
  }
  options.net_name = std::move(net_name);
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

inline Deadline deadline_after(std::chrono::nanoseconds timeout) { return Clock::now() + timeout; }

// post(payload) and collect(seconds or None) of Python's.
inline StorePeers::Agreement agreement_of(const py::object& post, const py::object& collect) {
  StorePeers::Agreement agreement;
  agreement.post = [post = held_function(post)](std::span<const std::byte> payload) {
    const py::gil_scoped_acquire locked;
    (*post)(py::bytes(reinterpret_cast<const char*>(payload.data()), payload.size()));
  };
  agreement.collect = [collect = held_function(collect)](Deadline deadline, const auto&) {
    const py::gil_scoped_acquire locked;
    const std::chrono::duration<double> left = deadline ? *deadline - Clock::now() : std::chrono::duration<double>(0);
    const py::object timeout = deadline ? py::object(py::float_(left.count())) : py::object(py::none());
    StorePeers::Payloads payloads;
    for (const py::handle item : (*collect)(timeout)) {
      const std::string_view view = py::cast<std::string_view>(item);
      const auto* const begin = reinterpret_cast<const std::byte*>(view.data());
      payloads.emplace_back(begin, begin + view.size());
    }
    return payloads;
  };
  return agreement;
}

// Kind, text, rank, seq, NCCL's code, NCCL's words, the last operation of each rank.
using Report = std::tuple<int, std::string, int, uint64_t, int, std::string, LastSeqs>;

// A Report, or None.
inline py::object report_of(const std::optional<Failure>& failure) {
  if (!failure) {
    return py::none();
  }
  return py::make_tuple(static_cast<int>(failure->kind), text_of_bytes(failure->text), failure->rank, failure->seq,
                        failure->nccl_code, text_of_bytes(failure->last_error), failure->last_seqs);
}

inline py::object take_report(StorePeers& peers, double timeout) {
  std::optional<Failure> failure;
  {
    const py::gil_scoped_release unlocked;
    failure = peers.take_report(deadline_of(timeout));
  }
  return report_of(failure);
}

inline void deliver(StorePeers& peers, const Report& report) {
  const auto& [kind, text, rank, seq, nccl_code, last_error, last_seqs] = report;
  BW_EXPECTS(kind > 0 && kind <= static_cast<int>(FailureKind::kClosed), "failure " + std::to_string(kind));
  peers.deliver({static_cast<FailureKind>(kind), text, rank, seq, nccl_code, last_error, last_seqs});
  wake_watchdog();
}

[[noreturn]] inline void fail_peers(StorePeers& peers, const std::string& kind, std::string text, int rank) {
  Failure failure{FailureKind::kError, std::move(text), rank};
  if (kind == "timeout") {
    failure.kind = FailureKind::kTimeout;
    failure.last_seqs = peers.last_seqs(0).value_or(LastSeqs());
  } else if (kind == "peer") {
    failure.kind = FailureKind::kPeer;
  }
  const auto error = peers.fail(failure, {});
  wake_watchdog();
  std::rethrow_exception(error);
}

// Who has not posted `round`; None: they are being asked, and will have answered within kAnswerPatience.
inline std::optional<std::string> late_in_round(StorePeers& peers, uint64_t round) {
  const auto last = peers.last_rounds();
  return last ? std::optional(peers.late_text(*last, round, "posted")) : std::nullopt;
}

inline void bind_progress(py::class_<StorePeers, Peers, std::shared_ptr<StorePeers>>& type) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  type.def("late_in_round", &late_in_round, py::arg("round"), Unlocked())
      .def("take_question", &StorePeers::take_question, Unlocked())
      .def("progress", &StorePeers::progress, Unlocked())
      .def(
          "answer",
          [](StorePeers& self, StorePeers::Answers answers) {
            self.answer(std::move(answers));
            wake_watchdog();
          },
          py::arg("answers"), Unlocked())
      .def(
          "ask_nobody",
          [](StorePeers& self) {
            self.ask_nobody();
            wake_watchdog();
          },
          Unlocked());
}

inline void bind_store_peers(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<StorePeers, Peers, std::shared_ptr<StorePeers>> type(m, "StorePeers");
  bind_progress(type);
  type.def(py::init([](std::string name, int rank, int world, double timeout_s, const py::object& post,
                       const py::object& collect, std::string id) {
             return std::make_shared<StorePeers>(std::move(name), rank, world, expect_timeout(timeout_s),
                                                 agreement_of(post, collect), std::move(id));
           }),
           py::arg("name"), py::arg("rank"), py::arg("world"), py::arg("timeout_s"), py::arg("post"),
           py::arg("collect"), py::arg("id") = "")
      .def("take_report", &take_report, py::arg("timeout"))
      .def("deliver", &deliver, py::arg("report"), Unlocked())
      .def("lose", &StorePeers::lose, py::arg("rank"), Unlocked())
      .def("await_leave", &StorePeers::await_leave, Unlocked())
      .def("await_failure", &StorePeers::await_failure, Unlocked())
      .def("finish", &StorePeers::finish, Unlocked())
      .def(
          "expect_peers",
          [](StorePeers& self, const std::string& what) {
            self.health().expect_usable();
            if (const auto failure = self.trouble(0, [](int) { return true; }, what.c_str())) {
              std::rethrow_exception(self.fail(*failure, {}));
            }
          },
          py::arg("what"), Unlocked())
      .def("fail", &fail_peers, py::arg("kind"), py::arg("text"), py::arg("rank") = -1, Unlocked())
      .def_property_readonly("rank", [](StorePeers& self) { return self.health().rank(); })
      .def_property_readonly("prefix", [](StorePeers& self) { return self.health().prefix(0); })
      .def_property_readonly("has_left", &StorePeers::has_left)
      .def_property_readonly("has_failed", [](StorePeers& self) { return self.health().has_failed(); });
}

inline py::str trouble_of(Peers& peers) {
  std::string text;
  {
    const py::gil_scoped_release unlocked;
    if (const auto failure = peers.trouble(0, [](int) { return true; }, "the operation")) {
      text = failure->text;
    } else if (peers.health().has_failed()) {
      text = "this rank has failed";
    }
  }
  return text_of_bytes(text);
}

inline void bind_peers(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Peers, PeersRef>(m, "Peers")
      .def(
          "leave",
          [](Peers& self, double timeout) {
            self.join();
            self.part(deadline_of(timeout));
          },
          py::arg("timeout"), Unlocked())
      // Why what needs every rank cannot come to its end; empty where nothing is known against it.
      .def("trouble", &trouble_of);
  bind_store_peers(m);
  m.def(
      "peers_of",
      [](const CommRef& comm) -> PeersRef {
        auto host = std::dynamic_pointer_cast<HostComm>(comm);
        BW_EXPECTS(host != nullptr, "only a communicator of ranks that share a host can stand for their agreement");
        host->leave_flight_to_another();
        return host;
      },
      py::arg("comm"));
}

inline void bind_nccl(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("set_nccl_folders", &set_nccl_folders, py::arg("folders"));
  m.def("nccl_info", &nccl_info);
  m.def("nccl_unique_id", &nccl_unique_id);
  m.def("nccl_error_string", [](int code) { return std::string(nccl_api().get_error_string(code)); }, py::arg("code"));
  m.def("stop_freeing", [] {
    {
      const py::gil_scoped_release unlocked;
      stop_freeing();
    }
    PendingDecrefs::all().drop();
    PendingDecrefs::all().stop();
  });
  bind_peers(m);
  py::class_<NcclOptions>(m, "NcclOptions")
      .def(py::init(&nccl_options), py::arg("config"), py::arg("net_name"), py::arg("registers_memory"),
           py::arg("pool"), py::arg("serialises"))
      .def("set_check", &set_check, py::arg("check"));
  py::class_<NcclComm, Comm, NcclComm::Ref>(m, "NcclComm")
      .def_property_readonly("has_windows", py::cpp_function(&NcclComm::has_windows, Unlocked()))
      .def("register_pool", &NcclComm::register_pool, Unlocked())
      .def(
          "split",
          [](NcclComm& self, const PeersRef& peers, int color, int key, const NcclOptions& options, double timeout_s) {
            return released_without_gil(
                self.split(peers, color, key, options, deadline_after(expect_timeout(timeout_s))));
          },
          py::arg("peers").none(true), py::arg("color"), py::arg("key"), py::arg("options"), py::arg("timeout_s"),
          Unlocked());
  m.def(
      "make_nccl_comm",
      [](const PeersRef& peers, int device, const py::bytes& id, const NcclOptions& options, double timeout_s) {
        const NcclUniqueId unique_id = unique_id_of(id);
        const Deadline deadline = deadline_after(expect_timeout(timeout_s));
        py::gil_scoped_release unlocked;
        return released_without_gil(NcclComm::make(peers, device, unique_id, options, deadline));
      },
      py::arg("peers"), py::arg("device"), py::arg("id"), py::arg("options"), py::arg("timeout_s"));
  m.def(
      "make_nccl_pair",
      [](const PeersRef& peers, int device, const py::bytes& id, const NcclOptions& options, double timeout_s) {
        const NcclUniqueId unique_id = unique_id_of(id);
        const Deadline deadline = deadline_after(expect_timeout(timeout_s));
        py::gil_scoped_release unlocked;
        auto [gathers, reduces] = NcclComm::pair(peers, device, unique_id, options, deadline);
        return std::pair(released_without_gil(std::move(gathers)), released_without_gil(std::move(reduces)));
      },
      py::arg("peers"), py::arg("device"), py::arg("id"), py::arg("options"), py::arg("timeout_s"));
}

}  // namespace bucketwheel
