// Bindings of comm/peers: Links between processes, and the peers of ranks that do not share a host.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
#include "comm/peers/link.h"
#include "comm/peers/store_peers.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

namespace py = pybind11;

// A function of Python's for threads that do not hold the GIL; it takes it to end.
inline std::shared_ptr<const py::function> held_function(const py::object& function) {
  return {new py::function(function), [](const py::function* owned) {
            const py::gil_scoped_acquire locked;
            delete owned;
          }};
}

// post(payload) and collect(seconds or None) of Python's.
inline StorePeers::Ways ways_of(const py::object& post, const py::object& collect,
                                const std::vector<std::pair<int, LinkRef>>& links, std::shared_ptr<Bell> bell) {
  StorePeers::Ways ways;
  ways.post = [post = held_function(post)](std::span<const std::byte> payload) {
    const py::gil_scoped_acquire locked;
    (*post)(py::bytes(reinterpret_cast<const char*>(payload.data()), payload.size()));
  };
  ways.collect = [collect = held_function(collect)](Deadline deadline, const auto&) {
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
  for (const auto& [rank, link] : links) {
    ways.neighbours.push_back({rank, link});
  }
  ways.bell = std::move(bell);
  return ways;
}

// Kind, text, rank, seq, NCCL's code, NCCL's words, the last operation of each rank.
using Report = std::tuple<int, std::string, int, uint64_t, int, std::string, LastSeqs>;

// A Report, or None.
inline py::object report_of(const StorePeers& peers) {
  const std::optional<Failure> failure = peers.report();
  if (!failure) {
    return py::none();
  }
  return py::make_tuple(static_cast<int>(failure->kind), text_of_bytes(failure->text), failure->rank, failure->seq,
                        failure->nccl_code, text_of_bytes(failure->last_error), failure->last_seqs);
}

inline void deliver(StorePeers& peers, const Report& report) {
  const auto& [kind, text, rank, seq, nccl_code, last_error, last_seqs] = report;
  BW_EXPECTS(kind > 0 && kind <= static_cast<int>(FailureKind::kClosed), "failure " + std::to_string(kind));
  peers.deliver({static_cast<FailureKind>(kind), text, rank, seq, nccl_code, last_error, last_seqs});
  wake_watchdog();
}

// Raises the error that stands.
[[noreturn]] inline void fail_round(StorePeers& peers, std::string text, bool is_timeout) {
  Failure failure{FailureKind::kError, std::move(text), -1};
  if (is_timeout) {
    failure.kind = FailureKind::kTimeout;
    failure.last_seqs = peers.last_seqs(0).value_or(LastSeqs());
  }
  const auto error = peers.fail(failure, {});
  wake_watchdog();
  std::rethrow_exception(error);
}

// Who has not posted `round`; None: they are being asked, and will have answered within kPatience.answer. With `waited_s` the
// wait is told to stderr where that is due, [Note: who is missing]; None: it is not.
inline std::optional<std::string> late_in_round(StorePeers& peers, uint64_t round, std::optional<double> waited_s) {
  if (waited_s && !peers.health().reports().is_due(expect_timeout(*waited_s))) {
    return {};
  }
  const auto last = peers.last_rounds();
  if (!last) {
    return {};
  }
  std::string text = peers.late_text(*last, round, "posted", "exchange");
  if (waited_s) {
    const std::string what = "collect() of round " + std::to_string(round);
    peers.tell(expect_timeout(*waited_s), what, *last, round, "posted", "exchange");
  }
  return text;
}

// Raises what the communicator has failed with, or fails with now.
inline void expect_peers(StorePeers& peers, const std::string& what) {
  peers.health().expect_usable();
  if (const auto failure = peers.trouble(0, [](int) { return true; }, what.c_str())) {
    std::rethrow_exception(peers.fail(*failure, {}));
  }
}

inline void bind_store_peers(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Link, LinkRef>(m, "Link")
      .def(py::init([](int socket, double heartbeat_timeout_s) {
             return std::make_shared<Link>(FileDescriptor(socket), expect_timeout(heartbeat_timeout_s));
           }),
           py::arg("socket"), py::arg("heartbeat_timeout_s"))
      .def_property_readonly("is_open", [](Link& self) { return self.look() == Link::State::kOpen; });
  py::class_<Bell, std::shared_ptr<Bell>>(m, "Bell")
      .def(py::init<>())
      .def("wait", [](Bell& self, double timeout) { self.wait(deadline_of(timeout)); }, py::arg("timeout"), Unlocked());
  py::class_<StorePeers, Peers, std::shared_ptr<StorePeers>>(m, "StorePeers")
      .def(py::init([](std::string name, int rank, int world, double timeout_s, std::string id, const py::object& post,
                       const py::object& collect, const std::vector<std::pair<int, LinkRef>>& links,
                       std::shared_ptr<Bell> bell) {
             return std::make_shared<StorePeers>(std::move(name), rank, world, expect_timeout(timeout_s),
                                                 ways_of(post, collect, links, std::move(bell)), std::move(id));
           }),
           py::kw_only(), py::arg("name"), py::arg("rank"), py::arg("world"), py::arg("timeout_s"), py::arg("id"),
           py::arg("post"), py::arg("collect"), py::arg("links"), py::arg("bell"))
      .def_property_readonly("report", &report_of)
      .def("told", &StorePeers::told, Unlocked())
      .def("deliver", &deliver, py::arg("report"), Unlocked())
      .def("lose_store", &StorePeers::lose_store, Unlocked())
      .def("progress", &StorePeers::progress)
      .def_property_readonly("asks", &StorePeers::asks)
      .def(
          "answer",
          [](StorePeers& self, StorePeers::Answers answers) {
            self.answer(std::move(answers));
            wake_watchdog();
          },
          py::arg("answers"), Unlocked())
      .def("late_in_round", &late_in_round, py::arg("round"), py::arg("waited_s") = py::none(), Unlocked())
      .def("in_call", [](StorePeers& self, const std::string& what) { return self.call().in_call(what); })
      .def("expect_peers", &expect_peers, py::arg("what"), Unlocked())
      .def("fail_round", &fail_round, py::arg("text"), py::arg("is_timeout"), Unlocked())
      .def_property_readonly("rank", [](StorePeers& self) { return self.health().rank(); })
      .def_property_readonly("timeout_s",
                             [](StorePeers& self) { return std::chrono::duration<double>(self.timeout()).count(); })
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

}  // namespace bucketwheel
