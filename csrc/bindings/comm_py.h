// Bindings of comm/: communicators, handles, and the coalesced collectives over tensor lists.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "bindings/error_py.h"
#include "comm/comm.h"
#include "comm/host/local.h"
#include "comm/host/shm.h"
#include "comm/operation.h"
#include "comm/peers/peers.h"
#include "comm/peers/tie.h"

namespace bucketwheel {

namespace py = pybind11;

// Communicators and worlds are destroyed, and wait for their operations, without the GIL: an operation's end may need
// it.
template <class T>
std::shared_ptr<T> released_without_gil(std::shared_ptr<T> owned) {
  T* const raw = owned.get();
  return std::shared_ptr<T>(raw, [owned = std::move(owned)](T*) mutable {
    if (PyGILState_Check() != 0) {
      const WithoutGil unlocked;
      owned.reset();
    } else {
      owned.reset();
    }
  });
}

inline std::chrono::nanoseconds expect_timeout(double timeout_s) {
  BW_EXPECTS(timeout_s > 0, "timeout_s must be positive, got " + std::to_string(timeout_s));
  constexpr double kYear_s = 365.0 * 86400.0;
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(timeout_s, kYear_s) * 1e9));
}

inline IssueOptions issue_options(DeviceId device, py::handle stream, const std::vector<HandleRef>& after,
                                  bool timing) {
  IssueOptions out;
  out.stream = optional_argument<Stream>(stream, "stream", "a Stream");
  out.caller = current_stream(device);
  for (const HandleRef& handle : after) {
    out.after.push_back(handle->event());
  }
  out.timing = timing;
  return out;
}

// `with PublicCall(comms, "bw.checkpoint.save"):` names the call to the ranks of all these communicators: [Note: who is
// missing], comm/public_call.h.
class CallOfAll {
 public:
  CallOfAll(std::vector<CommRef> comms, std::string name) : comms_(std::move(comms)), name_(std::move(name)) {}
  void note(bool begins) const {
    for (const CommRef& comm : comms_) {
      if (Peers& peers = comm->peers(); !peers.health().is_forked()) {
        begins ? peers.call().enter(name_) : peers.call().leave();
      }
    }
  }

 private:
  std::vector<CommRef> comms_;
  std::string name_;
};

// The tensors of one call as pairs, checked against each other; they live as long as the operation needs them.
class TensorPairs {
 public:
  // Each `full`, an output of an all-gather and an input of a reduce-scatter, has world x the elements of its `shard`.
  TensorPairs(Collective collective, const py::sequence& outputs, const py::sequence& inputs, const Comm& comm)
      : device_(comm.device()) {
    const bool gathers = collective == Collective::kAllGather;
    const char* const full_list = gathers ? "outputs" : "inputs";
    const char* const shard_list = gathers ? "inputs" : "outputs";
    const int world = comm.world();
    const py::object full_items = items_of(gathers ? outputs : inputs);
    const py::object shard_items = items_of(gathers ? inputs : outputs);
    const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(full_items.ptr()));
    const auto shard_count = static_cast<size_t>(PySequence_Fast_GET_SIZE(shard_items.ptr()));
    BW_EXPECTS(count == shard_count, std::string(full_list) + " has " + std::to_string(count) + " tensors, " +
                                         shard_list + " has " + std::to_string(shard_count));
    pairs_.reserve(count);
    held_->reserve(2 * count);
    for (size_t i = 0; i < count; ++i) {
      const py::handle full_object = PySequence_Fast_GET_ITEM(full_items.ptr(), static_cast<Py_ssize_t>(i));
      const py::handle shard_object = PySequence_Fast_GET_ITEM(shard_items.ptr(), static_cast<Py_ssize_t>(i));
      const dlpack::Name full_name{full_list, static_cast<int64_t>(i)};
      const dlpack::Name shard_name{shard_list, static_cast<int64_t>(i)};
      const View full = hold(full_object, full_name);
      const View shard = hold(shard_object, shard_name);
      if (full.dtype != shard.dtype || full.numel != world * shard.numel) {
        throw_unequal(full_object, full_name, shard_object, shard_name, world);
      }
      pairs_.push_back({full, shard});
    }
  }

  std::vector<TensorPair> take() { return std::move(pairs_); }
  IssueOptions options(py::handle stream, const std::vector<HandleRef>& after, bool timing) {
    IssueOptions out = issue_options(device_, stream, after, timing);
    out.keepalive.push_back(std::move(held_));
    return out;
  }
  std::shared_ptr<Request> request(const CommRef& comm, const OperationKind& kind) {
    auto op = comm->checked(kind, take(), nullptr);
    held_->hold_aliases();
    return std::make_shared<Request>(comm, std::move(op), std::vector<Handle::Keepalive>{std::move(held_)});
  }

 private:
  // A list or tuple: `sequence` itself where it is one.
  static py::object items_of(const py::sequence& sequence) {
    auto items = py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "expected a sequence of tensors"));
    if (!items) {
      throw py::error_already_set();
    }
    return items;
  }
  View hold(py::handle object, dlpack::Name name) {
    dlpack::TensorAbi tensor;
    View view;
    if (!held_->hold(object, &tensor) || !dlpack::is_dense_on(tensor, device_, &view.data, &view.numel)) {
      throw_unfit(object, name);
    }
    const std::optional<DType> dtype = dlpack::find_dtype(tensor.dtype);
    if (!dtype) {
      throw_unfit(object, name);
    }
    view.dtype = *dtype;
    return view;
  }

  [[noreturn]] void throw_unfit(py::handle object, dlpack::Name name) const {
    const dlpack::Described tensor = dlpack::describe_item(object, name, device_);  // says what is wrong, but for gaps
    throw ValueError(name.text() + " is not contiguous: " + tensor.layout_text());
  }
  [[noreturn]] static void throw_unequal(py::handle full_object, dlpack::Name full_name, py::handle shard_object,
                                         dlpack::Name shard_name, int world) {
    const dlpack::Described full = dlpack::describe(full_object);
    const dlpack::Described shard = dlpack::describe(shard_object);
    dlpack::expect_dtype(full, shard.dtype, full_name);
    throw ValueError(full_name.text() + " has shape " + full.shape_text() + ", expected world (" +
                     std::to_string(world) + ") x the " + std::to_string(shard.numel) + " elements of " +
                     shard_name.text() + ", shape " + shard.shape_text());
  }

  const DeviceId device_;
  std::vector<TensorPair> pairs_;
  std::shared_ptr<HeldList> held_ = std::make_shared<HeldList>();
};

inline HandleRef all_gather_tensors(Comm& comm, const py::sequence& outputs, const py::sequence& inputs,
                                    py::handle stream, const std::vector<HandleRef>& after, bool timing) {
  TensorPairs tensors(Collective::kAllGather, outputs, inputs, comm);
  IssueOptions options = tensors.options(stream, after, timing);
  const WithoutGil unlocked;
  return comm.all_gather(tensors.take(), std::move(options));
}

// "sum", "avg", or a number: the factor of PreMulSum.
inline Reduction reduction_of(py::handle op) {
  if (py::isinstance<py::str>(op)) {
    if (PyUnicode_CompareWithASCIIString(op.ptr(), "sum") == 0) {
      return {};
    }
    const auto name = op.cast<std::string>();
    BW_EXPECTS(name == "sum" || name == "avg", "op '" + name + "' is not supported: 'sum', 'avg' and PreMulSum are");
    return {name == "sum" ? ReduceOp::kSum : ReduceOp::kAvg, 1.0};
  }
  return {ReduceOp::kPreMul, op.cast<double>()};
}

inline HandleRef reduce_scatter_tensors(Comm& comm, const py::sequence& outputs, const py::sequence& inputs,
                                        py::handle op, py::handle stream, const std::vector<HandleRef>& after,
                                        bool timing) {
  const Reduction reduction = reduction_of(op);
  TensorPairs tensors(Collective::kReduceScatter, outputs, inputs, comm);
  IssueOptions options = tensors.options(stream, after, timing);
  const WithoutGil unlocked;
  return comm.reduce_scatter(tensors.take(), reduction, nullptr, std::move(options));
}

// The tensor of an operation that has but one.
inline View only_view(const Comm& comm, py::handle tensor) {
  const dlpack::Described described = dlpack::describe_item(tensor, {"tensor"}, comm.device());
  BW_EXPECTS(described.is_contiguous(), "tensor is not contiguous: " + described.layout_text());
  return {described.data, described.numel, described.dtype};
}

// `numel` elements of `view` from `begin` on.
inline View part_of(const View& view, int64_t begin, int64_t numel) {
  return {static_cast<std::byte*>(view.data) + static_cast<size_t>(begin) * size_of(view.dtype), numel, view.dtype};
}

// [Note: all-reduce] What ranks can share equally is reduce-scattered in place and then gathered. Of the rest, fewer elements
// than ranks, every rank gives each other rank a copy, so that the reduce-scatter leaves the whole sum on every rank. They
// all add in rank order and get the same bits; but NCCL adds in an order of each rank's own, so there rank 0's sums of the
// rest go to all. Both pairs are always there, if empty: no other number of elements, and no reduce-scatter of one tensor,
// has the same signature.
inline HandleRef all_reduce_tensor(Comm& comm, py::handle tensor, py::handle op, py::handle stream,
                                   const std::vector<HandleRef>& after, bool timing) {
  const Reduction reduction = reduction_of(op);
  const View whole = only_view(comm, tensor);
  const int64_t world = comm.world();
  const int64_t rest = whole.numel % world;
  const View shared = part_of(whole, 0, whole.numel - rest);
  const View remainder = part_of(whole, shared.numel, rest);
  const View own = part_of(shared, comm.rank() * (shared.numel / world), shared.numel / world);
  std::vector<TensorPair> pairs{{shared, own}, {remainder, remainder}};
  IssueOptions options = issue_options(comm.device(), stream, after, timing);
  options.keepalive.push_back(held(tensor));
  IssueOptions later = options;
  later.after.clear();
  if (rest != 0) {
    const py::object copies =
        tensor.attr("detach")().attr("view")(-1).attr("narrow")(0, shared.numel, rest).attr("repeat")(world);
    pairs[1].full = {dlpack::describe(copies).data, world * rest, whole.dtype};
    options.keepalive.push_back(held(copies));
  }
  const bool has_one_order = world <= 2 || std::string_view(comm.backend()) != "nccl";
  const WithoutGil unlocked;
  HandleRef last = comm.reduce_scatter(std::move(pairs), reduction, nullptr, std::move(options));
  if (shared.numel != 0) {
    last = comm.all_gather({{shared, own}}, later);
  }
  if (rest != 0 && !has_one_order) {
    last = comm.broadcast(remainder, 0, std::move(later));
  }
  return last;
}

inline HandleRef broadcast_tensor(Comm& comm, py::handle tensor, int root, py::handle stream,
                                  const std::vector<HandleRef>& after, bool timing) {
  const View view = only_view(comm, tensor);
  IssueOptions options = issue_options(comm.device(), stream, after, timing);
  options.keepalive.push_back(held(tensor));
  const WithoutGil unlocked;
  return comm.broadcast(view, root, std::move(options));
}

// Of a reduce-scatter; without `op` of an all-gather.
inline std::shared_ptr<Request> make_request(const CommRef& comm, const py::sequence& outputs,
                                             const py::sequence& inputs, py::handle op, uint32_t unit) {
  OperationKind kind;
  if (!op.is_none()) {
    kind = {Collective::kReduceScatter, reduction_of(op)};
  }
  kind.unit = unit;
  return TensorPairs(kind.collective, outputs, inputs, *comm).request(comm, kind);
}

inline HandleRef start_request(const Request& request, py::handle stream, const std::vector<HandleRef>& after,
                               bool timing) {
  IssueOptions options = issue_options(request.device(), stream, after, timing);
  const WithoutGil unlocked;
  return request.start(std::move(options));
}

// `full`, which the ranks share equally.
inline View full_view(const Comm& comm, py::handle full) {
  const dlpack::Described tensor = dlpack::describe_item(full, {"full", 0}, comm.device());
  BW_EXPECTS(tensor.is_contiguous() && tensor.numel % comm.world() == 0,
             "full must be contiguous and divisible by the world size (" + std::to_string(comm.world()) + "), got " +
                 tensor.layout_text());
  return {tensor.data, tensor.numel, tensor.dtype};
}

// The sums of `full` go to `sink` and nowhere else.
inline HandleRef reduce_scatter_to_sink(Comm& comm, py::handle full, std::shared_ptr<ReduceSink> sink,
                                        py::handle stream, const std::vector<HandleRef>& after, bool timing) {
  const View tensor = full_view(comm, full);
  const TensorPair pair{tensor, {nullptr, tensor.numel / comm.world(), tensor.dtype}};
  IssueOptions options = issue_options(comm.device(), stream, after, timing);
  options.keepalive.push_back(held(full));
  const WithoutGil unlocked;
  return comm.reduce_scatter({pair}, {}, std::move(sink), std::move(options));
}

inline void post_bytes(Comm& comm, const py::bytes& payload) {
  const std::string_view view = payload;
  const WithoutGil unlocked;  // another thread may be collecting, and need it
  comm.post(std::as_bytes(std::span(view.data(), view.size())));
}

// For waits on the host: throws what a signal handler raises, as on Ctrl-C.
inline void check_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

inline py::list collect_bytes(Comm& comm, std::optional<double> timeout) {
  std::vector<std::vector<std::byte>> payloads;
  {
    const WithoutGil unlocked;
    payloads = comm.collect(deadline_of(timeout), check_signals);
  }
  py::list out;
  for (const auto& payload : payloads) {
    out.append(py::bytes(reinterpret_cast<const char*>(payload.data()), payload.size()));
  }
  return out;
}

// post() and collect(). What a signal handler raises ends the wait and aborts: the peers will find this rank at no later
// round.
inline py::list exchange_bytes(Comm& comm, const py::bytes& payload) {
  post_bytes(comm, payload);
  try {
    return collect_bytes(comm, std::nullopt);
  } catch (const py::error_already_set& error) {
    comm.abort(error.type().attr("__name__").cast<std::string>() + " in exchange, while this rank waited");
    throw;
  }
}

// Each handle's wait(stream). Where several fail, the error of the first; none is left unwaited for.
inline void wait_all(const py::sequence& handles, const py::object& stream) {
  std::optional<py::error_already_set> failure;
  for (const py::handle handle : handles) {
    try {
      handle.attr("wait")(stream);
    } catch (py::error_already_set& error) {
      if (!error.matches(class_of(Error("")))) {
        throw;
      }
      if (!failure) {
        failure.emplace(error);
      }
    }
  }
  if (failure) {
    throw py::error_already_set(*failure);
  }
}

inline void bind_handle(py::module_& m) {
  using Unlocked = py::call_guard<WithoutGil>;
  py::class_<Handle, HandleRef>(m, "Handle")
      .def(
          "wait",
          [](Handle& self, py::handle stream) {
            StreamRef waiting = optional_argument<Stream>(stream, "stream", "a Stream");
            if (waiting == nullptr) {
              waiting = current_stream(self.device());
            }
            const WithoutGil unlocked;
            self.wait(waiting.get());
          },
          py::arg("stream") = py::none())
      .def(
          "synchronize", [](Handle& self, std::optional<double> timeout) { self.synchronize(deadline_of(timeout)); },
          py::arg("timeout") = py::none(), Unlocked())
      .def("query", &Handle::query, Unlocked())
      .def_property_readonly("is_ordered", py::cpp_function(&Handle::is_ordered, Unlocked()))
      .def("elapsed_s", &Handle::elapsed_s, py::arg("later"))
      .def_property_readonly("is_captured", &Handle::is_captured)
      .def_property_readonly("seq", &Handle::seq)
      .def_property_readonly("size_bytes", &Handle::size_bytes)
      .def_property_readonly("event", &Handle::event);
}

// What makes communicators of the host; other files bind those of NCCL and of torch's process groups.
inline void bind_host_comms(py::module_& m) {
  using Unlocked = py::call_guard<WithoutGil>;
  m.def("mismatch_text", [](const std::vector<std::string>& calls) { return mismatch_text(calls); }, py::arg("calls"));
  py::class_<LocalWorld, std::shared_ptr<LocalWorld>>(m, "LocalWorld")
      .def(py::init([](int world, bool stages_inputs) {
             return released_without_gil(std::make_shared<LocalWorld>(world, stages_inputs));
           }),
           py::arg("world"), py::arg("stages_inputs") = false)
      .def_property_readonly("world", &LocalWorld::world)
      .def(
          "join",
          [](LocalWorld& self, int rank, std::string name, double timeout_s) {
            return released_without_gil(self.join(rank, std::move(name), expect_timeout(timeout_s)));
          },
          py::arg("rank"), py::arg("name"), py::arg("timeout_s"), Unlocked())
      .def(
          "join_cuda",
          [](LocalWorld& self, int rank, std::string name, double timeout_s, PoolRef pool) {
            return released_without_gil(
                self.join_cuda(rank, std::move(name), expect_timeout(timeout_s), std::move(pool)));
          },
          py::arg("rank"), py::arg("name"), py::arg("timeout_s"), py::arg("pool"), Unlocked());
  m.def("expect_shared_memory", &expect_shared_memory, py::arg("world"), Unlocked());
  m.def(
      "make_shm_comm",
      [](int rank, std::vector<int> sockets, std::vector<pid_t> pids, std::string name, double timeout_s,
         std::string id, std::optional<double> left_s) {
        ShmOptions options{rank,
                           static_cast<int>(sockets.size()),
                           std::move(sockets),
                           std::move(pids),
                           std::move(name),
                           expect_timeout(timeout_s),
                           std::move(id),
                           deadline_of(left_s)};
        return released_without_gil(make_shm_comm(options));
      },
      py::arg("rank"), py::arg("sockets"), py::arg("pids"), py::arg("name"), py::arg("timeout_s"), py::kw_only(),
      py::arg("id") = "", py::arg("left_s") = py::none(), Unlocked());
}

inline void bind_comm(py::module_& m) {
  using Unlocked = py::call_guard<WithoutGil>;
  bind_handle(m);
  const py::class_<ReduceSink, std::shared_ptr<ReduceSink>> sink(m, "ReduceSink");
  py::class_<Comm, CommRef>(m, "Comm")
      .def_property_readonly("rank", &Comm::rank)
      .def_property_readonly("world", &Comm::world)
      .def_property_readonly("name", &Comm::name)
      .def_property_readonly("backend", &Comm::backend)
      .def_property_readonly("device", [](const Comm& self) { return index_of(self.device()); })
      .def_property_readonly("pool", &Comm::pool)
      .def_property_readonly("stream", py::cpp_function(&Comm::stream, Unlocked()))
      .def("all_gather", &all_gather_tensors, py::arg("outputs"), py::arg("inputs"), py::arg("stream") = py::none(),
           py::arg("after") = std::vector<HandleRef>(), py::arg("timing") = false)
      .def("reduce_scatter", &reduce_scatter_tensors, py::arg("outputs"), py::arg("inputs"), py::arg("op") = "sum",
           py::arg("stream") = py::none(), py::arg("after") = std::vector<HandleRef>(), py::arg("timing") = false)
      .def("reduce_scatter_to_sink", &reduce_scatter_to_sink, py::arg("full"), py::arg("sink").none(false),
           py::arg("stream") = py::none(), py::arg("after") = std::vector<HandleRef>(), py::arg("timing") = false)
      .def("all_reduce", &all_reduce_tensor, py::arg("tensor"), py::arg("op") = "sum", py::arg("stream") = py::none(),
           py::arg("after") = std::vector<HandleRef>(), py::arg("timing") = false)
      .def("broadcast", &broadcast_tensor, py::arg("tensor"), py::arg("root"), py::arg("stream") = py::none(),
           py::arg("after") = std::vector<HandleRef>(), py::arg("timing") = false)
      .def("post", &post_bytes, py::arg("payload"))
      .def("collect", &collect_bytes, py::arg("timeout") = py::none())
      .def("exchange", &exchange_bytes, py::arg("payload"))
      .def("report_after",
           [](Comm& self, double seconds) { self.peers().health().reports().set_first(expect_timeout(seconds)); })
      .def("abort", &Comm::abort, py::arg("reason"), Unlocked())
      .def(
          "close", [](Comm& self, std::optional<double> timeout) { self.close(deadline_of(timeout)); },
          py::arg("timeout") = py::none(), Unlocked());
  m.def("wait_all", &wait_all, py::arg("handles"), py::arg("stream") = py::none());
  py::class_<CallOfAll>(m, "PublicCall")
      .def(py::init<std::vector<CommRef>, std::string>(), py::arg("comms"), py::arg("name"))
      .def("__enter__", [](const CallOfAll& self) { self.note(true); })
      .def("__exit__", [](const CallOfAll& self, py::object, py::object, py::object) { self.note(false); });
  py::class_<Request, std::shared_ptr<Request>>(m, "Request")
      .def("start", &start_request, py::arg("stream") = py::none(), py::arg("after") = std::vector<HandleRef>(),
           py::arg("timing") = false);
  m.def("make_request", &make_request, py::arg("comm"), py::arg("outputs"), py::arg("inputs"),
        py::arg("op") = py::none(), py::arg("unit") = 0);
  // Its destructor waits for a look, which needs no GIL.
  py::class_<Tie, std::shared_ptr<Tie>>(m, "Tie")
      .def(py::init<CommRef, CommRef>(), py::arg("one"), py::arg("other"))
      .def("look", &Tie::look, Unlocked());
  m.attr("END_OF_WINDOW") = kEndOfWindow;
  m.attr("MAX_PAYLOAD_BYTES") = Comm::kMaxPayloadBytes;
  bind_host_comms(m);
}

}  // namespace bucketwheel
