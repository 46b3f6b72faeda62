// Bindings of comm/c10d/comm_c10d.h: a Wire of Python's, and communicators over it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bindings/comm_py.h"
#include "bindings/nccl_py.h"
#include "comm/c10d/comm_c10d.h"
#include "comm/c10d/wire.h"

namespace bucketwheel {

namespace py = pybind11;

inline WireBroken broken_of(const py::error_already_set& error, int peer) {
  return {peer, py::str(error.value()).cast<std::string>()};
}

// Over start(peer, is_sent, memory), which returns what wait() takes, and never waits itself. Called by one thread, which
// is never Python's main one: no signal's exception comes up in them.
class PythonWire final : public Wire {
 public:
  PythonWire(const py::object& start, const py::object& wait)
      : start_(held_function(start)), wait_(held_function(wait)) {}

  std::unique_ptr<Transfer> start(std::span<const Message> messages) override {
    const py::gil_scoped_acquire locked;
    auto transfer = std::make_unique<PythonTransfer>(wait_);
    for (const Message& message : messages) {
      const auto memory = py::memoryview::from_memory(message.data, static_cast<py::ssize_t>(message.size_bytes));
      try {
        auto& works = message.is_sent ? transfer->sent : transfer->received;
        works.emplace_back(message.peer, (*start_)(message.peer, message.is_sent, memory));
      } catch (const py::error_already_set& error) {
        throw broken_of(error, message.peer);
      }
    }
    return transfer;
  }

 private:
  struct PythonTransfer final : Transfer {
    explicit PythonTransfer(std::shared_ptr<const py::function> wait) : wait(std::move(wait)) {}
    ~PythonTransfer() override {  // NOLINT(bugprone-exception-escape): no thread state to be had is the end
      const py::gil_scoped_acquire locked;
      received.clear();
      sent.clear();
    }
    void receive() override { await_all(received); }
    void settle() override { await_all(sent); }

    using Works = std::vector<std::pair<int, py::object>>;
    void await_all(Works& works) {
      const py::gil_scoped_acquire locked;
      for (const auto& [peer, work] : works) {
        try {
          (*wait)(work);
        } catch (const py::error_already_set& error) {
          throw broken_of(error, peer);
        }
      }
      works.clear();
    }

    const std::shared_ptr<const py::function> wait;
    Works received;
    Works sent;
  };

  const std::shared_ptr<const py::function> start_;
  const std::shared_ptr<const py::function> wait_;
};

inline void bind_c10d(py::module_& m) {
  m.def(
      "make_c10d_comm",
      [](const PeersRef& peers, const py::object& start, const py::object& wait) -> CommRef {
        auto wire = std::make_unique<PythonWire>(start, wait);
        const py::gil_scoped_release unlocked;
        auto pool = Pool::make(cpu_device(), make_host_upstream());
        return released_without_gil(std::make_shared<C10dComm>(peers, std::move(wire), std::move(pool)));
      },
      py::arg("peers"), py::arg("start"), py::arg("wait"));
}

}  // namespace bucketwheel
