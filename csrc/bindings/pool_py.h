// Bindings of pool/: Pool and Lease. bucketwheel/pool/pool.py wraps them and documents them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/device_py.h"
#include "bindings/dlpack.h"
#include "pool/pool.h"

namespace bucketwheel {

namespace py = pybind11;

inline DType dtype_named(const std::string& name) {
  const auto* const found = std::ranges::find(kDTypeNames, name);
  if (found == std::end(kDTypeNames)) {
    throw TypeError("unsupported dtype " + name + dlpack::kSupportedDTypes);
  }
  return static_cast<DType>(found - kDTypeNames);
}

// Slabs that are torch tensors (uint8), so that torch's own accounting of memory sees them.
class TorchUpstream final : public Upstream {
 public:
  // `allocate(nbytes)` returns a contiguous uint8 tensor of zeros, or raises PoolError.
  explicit TorchUpstream(py::function allocate) : allocate_(std::move(allocate)) {}
  ~TorchUpstream() override {  // NOLINT(bugprone-exception-escape): no thread state to be had is the end
    py::gil_scoped_acquire locked;
    allocate_ = {};
  }

  SlabRef allocate(size_t size_bytes) override {
    constexpr size_t kAlignBytes = 4096;  // torch aligns to 512 (CUDA) or 64 (CPU) bytes
    auto slab = std::make_shared<TorchSlab>();
    py::gil_scoped_acquire locked;
    const py::object tensor = allocate_(size_bytes + kAlignBytes);
    auto* begin = static_cast<std::byte*>(dlpack::describe(tensor).data);
    slab->data = begin + (kAlignBytes - reinterpret_cast<uintptr_t>(begin) % kAlignBytes) % kAlignBytes;
    slab->size_bytes = size_bytes;
    slab->id = new_id();
    slab->owner = dlpack::hold(tensor);
    return slab;
  }

 private:
  struct TorchSlab final : Slab {
    std::shared_ptr<void> owner;
  };
  py::function allocate_;
};

// `device`: the index of a CUDA device, or -1. `allocate`: a python function, for 'torch'.
inline UpstreamRef upstream_named(const std::string& name, int device, const py::object& allocate) {
  BW_EXPECTS((device >= 0) == (name == "cuda" || name == "torch"),
             "upstream '" + name + "' does not give memory of " +
                 (device < 0 ? "the cpu" : "cuda:" + std::to_string(device)) +
                 ": 'host' and 'shm' are for the cpu, 'torch' and 'cuda' for cuda devices");
  if (name == "host") {
    return make_host_upstream();
  }
  if (name == "shm") {
    return make_shm_upstream();
  }
  if (name == "torch") {
    return std::make_shared<TorchUpstream>(allocate.cast<py::function>());
  }
  return make_cuda_upstream(device);
}

inline py::tuple place_of(const Lease& lease) { return py::make_tuple(lease.slab()->id, lease.offset_bytes()); }

inline std::string text_of_lease(py::handle self) {
  const auto& lease = py::cast<const Lease&>(self);
  return "Lease(" + std::string(py::repr(py::str(lease.key()))) + ", nbytes=" + std::to_string(lease.size_bytes()) +
         ", slab=" + std::to_string(lease.slab()->id) + ", offset_bytes=" + std::to_string(lease.offset_bytes()) +
         ", " + (lease.is_live() ? "live)" : "released)");
}

// What bucketwheel.pool.pool makes of an argument: native streams and events of torch's, numbers of a shape.
inline py::object understood(const char* function, py::handle argument) {
  return py::module_::import("bucketwheel.pool.pool").attr(function)(argument);
}

inline StreamRef stream_given(py::handle stream) {
  return optional_argument<Stream>(understood("native_stream", stream), "stream", "a Stream");
}

// A tensor over the lease's bytes from `offset_bytes` on. It owns the lease, so a lease whose object was dropped
// lives as long as its tensors do.
inline py::object lease_tensor(const LeaseRef& lease, py::handle torch_dtype, py::handle given_shape,
                               py::handle given_offset) {
  const auto dtype_name = understood("_dtype_name", torch_dtype).cast<std::string>();
  auto shape = understood("_extents", given_shape).cast<std::vector<int64_t>>();
  const auto offset_bytes = understood("_offset", given_offset).cast<size_t>();
  const DType dtype = dtype_named(dtype_name);
  std::byte* data = lease->data() + offset_bytes;
  size_t size_bytes = size_of(dtype);
  bool fits = true;
  for (int64_t extent : shape) {
    BW_EXPECTS(extent >= 0,
               "lease '" + lease->key() + "': tensor shape has the negative extent " + std::to_string(extent));
    fits = fits && !__builtin_mul_overflow(size_bytes, static_cast<size_t>(extent), &size_bytes);
  }
  if (!fits || offset_bytes > lease->size_bytes() || size_bytes > lease->size_bytes() - offset_bytes) {
    throw ValueError("lease '" + lease->key() + "' of " + std::to_string(lease->size_bytes()) +
                     " bytes cannot hold a " + dtype_name + " tensor of shape " + dlpack::text_of(shape) +
                     (fits ? " (" + std::to_string(size_bytes) + " bytes)" : "") +
                     (offset_bytes ? " at byte " + std::to_string(offset_bytes) : ""));
  }
  return dlpack::make_tensor(data, dtype, std::move(shape), lease->device(), lease);
}

inline LeaseRef acquire_lease(Pool& pool, std::string key, int64_t nbytes, py::handle stream, std::string where) {
  BW_EXPECTS(nbytes >= 0, "acquire of key '" + key + "': nbytes must be at least 0, got " + std::to_string(nbytes));
  StreamRef waiting = optional_argument<Stream>(stream, "stream", "a Stream");
  if (waiting == nullptr) {
    waiting = current_stream(pool.device().id());
  }
  LeaseRef lease;
  {
    const py::gil_scoped_release unlocked;
    lease = pool.acquire(std::move(key), static_cast<size_t>(nbytes), waiting, std::move(where));
  }
  if (const std::string first = pool.take_divergence(); !first.empty()) {
    understood("_warn_of_divergence", py::str(first));
  }
  return lease;
}

inline void release_lease(Lease& self, py::handle after) {
  EventRef event = after.is_none() ? nullptr : understood("_event_of", after).cast<EventRef>();
  const StreamRef caller = event == nullptr ? current_stream(self.device()) : nullptr;
  py::gil_scoped_release unlocked;
  if (event == nullptr && self.is_live()) {
    if (caller != nullptr && is_capturing(*caller)) {
      throw CaptureError("release of lease '" + self.key() +
                         "' while a CUDA graph is captured in the current stream: replays would use its bytes; "
                         "release it after the capture, when the graph is not replayed any more");
    }
    event = self.end_of_use(caller);  // CUDA: what the caller has enqueued may not have run yet
  }
  self.release(std::move(event));
}

// By plan: name, (key, offset, size, whether it outlives a step) by key, the order of the acquires, total, load.
using GivenKey = std::tuple<std::string, size_t, size_t, bool>;
using GivenPlan = std::tuple<std::string, std::vector<GivenKey>, std::vector<uint32_t>, size_t, size_t>;

inline PoolPlan plan_of(const GivenPlan& given) {
  const auto& [name, keys, order, total_bytes, load_bytes] = given;
  PoolPlan plan{name, {}, order, total_bytes, load_bytes};
  for (const auto& [key, offset_bytes, size_bytes, outlives_step] : keys) {
    plan.keys.push_back({key, offset_bytes, size_bytes, outlives_step});
  }
  return plan;
}

inline void adopt_plans(Pool& self, const std::vector<GivenPlan>& given, bool is_strict) {
  std::vector<PoolPlan> plans;
  std::ranges::transform(given, std::back_inserter(plans), plan_of);
  const py::gil_scoped_release unlocked;
  self.adopt(std::move(plans), is_strict);
}

// Tuples: kind, the number of the lease, key, nbytes, the address of the stream or 0, where, whether a release has an
// event.
inline py::list end_trace(Pool& self) {
  constexpr const char* kKinds[] = {"live", "acquire", "use", "release"};
  const PoolTrace trace = self.end_trace();
  py::list records;
  for (const PoolTrace::Event& event : trace.events) {
    const PoolTrace::TracedLease& lease = trace.leases[event.lease];
    records.append(py::make_tuple(kKinds[static_cast<int>(event.kind)], event.lease, lease.key, lease.size_bytes,
                                  reinterpret_cast<uintptr_t>(event.stream), lease.where, event.has_event));
  }
  return records;
}

inline void bind_pool(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  // bucketwheel.pool.Lease documents it. Nothing wraps it: the quickest acquires are of one object and one call.
  py::class_<Lease, LeaseRef>(m, "Lease")
      .def_property_readonly("key", &Lease::key)
      .def_property_readonly("nbytes", &Lease::size_bytes)
      .def_property_readonly("is_live", &Lease::is_live)
      .def_property_readonly("data_ptr", [](const Lease& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("place", &place_of)
      .def("tensor", &lease_tensor, py::arg("dtype"), py::arg("shape"), py::kw_only(), py::arg("offset_bytes") = 0)
      .def("lend",
           [](const Lease& self) {
             const auto size_bytes = static_cast<int64_t>(self.size_bytes());
             return dlpack::make_tensor(self.data(), DType::kUInt8, {size_bytes}, self.device(), self.slab());
           })
      .def(
          "use", [](Lease& self, py::handle stream) { self.use(stream_given(stream)); }, py::arg("stream"))
      .def("release", &release_lease, py::arg("after") = py::none())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__",
           [](Lease& self, py::handle, py::handle, py::handle) {
             if (self.is_live()) {
               release_lease(self, py::none());
             }
           })
      .def("__repr__", &text_of_lease)
      .def("leave_to_owners", &Lease::leave_to_owners);

  py::class_<Pool, PoolRef>(m, "Pool")
      .def(py::init([](const std::string& upstream, size_t align_bytes, size_t min_slab_bytes, bool poison, int device,
                       const py::object& allocate) {
             return Pool::make(device_at(device), upstream_named(upstream, device, allocate),
                               {align_bytes, min_slab_bytes, poison});
           }),
           py::arg("upstream"), py::arg("align_bytes"), py::arg("min_slab_bytes"), py::arg("poison"),
           py::arg("device") = -1, py::arg("allocate") = py::none())
      .def_property_readonly("device", [](const Pool& self) { return index_of(self.device().id()); })
      .def("acquire", &acquire_lease, py::arg("key"), py::arg("nbytes"), py::arg("stream") = py::none(),
           py::arg("where") = "")
      .def("reserve", &Pool::reserve, py::arg("nbytes"), py::arg("slab_bytes"), Unlocked())
      .def("adopt", &adopt_plans, py::arg("plans"), py::arg("is_strict"))
      .def_property("regime", &Pool::regime, &Pool::set_regime)
      .def("end_step", &Pool::end_step)
      .def("begin_trace", &Pool::begin_trace)
      .def("end_trace", &end_trace)
      .def(
          "holds",
          [](const Pool& self, py::handle object) {
            const dlpack::Described tensor = dlpack::describe_on_any_device(object, {"tensor"});
            BW_EXPECTS(tensor.is_contiguous(), "the tensor of shape " + tensor.shape_text() + " is not contiguous");
            const auto size_bytes = static_cast<size_t>(tensor.numel) * size_of(tensor.dtype);
            return self.locate(tensor.data, size_bytes).slab != nullptr;
          },
          py::arg("tensor"))
      .def("stats",
           [](const Pool& self) {  // in the order of PoolStats, here and in bucketwheel.pool.pool
             return std::bit_cast<std::array<uint64_t, sizeof(PoolStats) / sizeof(uint64_t)>>(self.stats());
           })
      .def("check", &Pool::check, Unlocked())
      .def("expect_no_leases", &Pool::expect_no_leases)
      .def("trim", &Pool::trim, Unlocked())
      .def_property_readonly("align_bytes", &Pool::align_bytes)
      .def_property_readonly("is_poisoned", &Pool::is_poisoned);
}

}  // namespace bucketwheel
