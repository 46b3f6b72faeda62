// Bindings of comm/c10d/: a ProcessGroup that Python calls torch for, and communicators over it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <utility>

#include "bindings/comm_py.h"
#include "bindings/peers_py.h"
#include "comm/c10d/comm.h"

namespace bucketwheel {

namespace py = pybind11;

// Over an object of Python's that has `rooms`, pairs of tensors of bytes, all of one length, and the methods. Called by one
// thread, which is never Python's main one: no signal's exception comes up in them.
class PythonProcessGroup final : public ProcessGroup {
 public:
  explicit PythonProcessGroup(const py::object& group)
      : ProcessGroup(rooms_of(group),
                     dlpack::describe(py::object(group.attr("rooms")[py::int_(0)][py::int_(0)])).numel),
        start_(held_function(group.attr("start"))),
        wait_(held_function(group.attr("wait"))),
        abandon_(held_function(group.attr("abandon"))) {}

  void start(const AllToAll& what) override {
    const py::gil_scoped_acquire locked;
    py::object from = py::none();
    if (what.from != nullptr) {
      const auto bytes = static_cast<int64_t>(std::accumulate(what.sent.begin(), what.sent.end(), size_t{0}));
      from = dlpack::make_tensor(const_cast<std::byte*>(what.from), DType::kUInt8, {bytes}, {}, what.owner);
    }
    call(*start_, what.room, from, what.into, what.sent, what.received);
  }
  bool wait(size_t room) override { return call(*wait_, room); }
  void abandon() noexcept override {  // NOLINT(bugprone-exception-escape): no thread state to be had is the end
    try {
      call(*abandon_);
    } catch (const AllToAllFailed&) {  // no thread is to be had: what is under way ends at its time limit
    }
  }

 private:
  static std::array<Room, kRooms> rooms_of(const py::object& group) {
    std::array<Room, kRooms> rooms{};
    for (size_t i = 0; i < kRooms; ++i) {
      const auto [sent, received] = group.attr("rooms")[py::int_(i)].cast<std::pair<py::object, py::object>>();
      rooms.at(i) = {static_cast<std::byte*>(dlpack::describe(sent).data),
                     static_cast<std::byte*>(dlpack::describe(received).data)};
    }
    return rooms;
  }
  template <class... Args>
  static bool call(const py::function& function, const Args&... args) {
    const py::gil_scoped_acquire locked;
    try {
      return function(args...).ptr() == Py_True;
    } catch (const py::error_already_set& error) {
      throw AllToAllFailed{py::str(error.value()).cast<std::string>()};
    }
  }

  const std::shared_ptr<const py::function> start_;
  const std::shared_ptr<const py::function> wait_;
  const std::shared_ptr<const py::function> abandon_;
};

inline void bind_c10d(py::module_& m) {
  m.def(
      "make_c10d_comm",
      [](const PeersRef& peers, const py::object& group) -> CommRef {
        auto owned = std::make_unique<PythonProcessGroup>(group);
        const py::gil_scoped_release unlocked;
        auto pool = Pool::make(cpu_device(), make_host_upstream());
        return released_without_gil(std::make_shared<C10dComm>(peers, std::move(owned), std::move(pool)));
      },
      py::arg("peers"), py::arg("group"));
  m.attr("C10D_ROOMS") = ProcessGroup::kRooms;
}

}  // namespace bucketwheel
