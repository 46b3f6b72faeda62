// Bindings of pool/: Pool and Lease. bucketwheel/pool/pool.py wraps them and documents them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
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
  const char* name() const override { return "torch"; }

  SlabRef allocate(size_t size_bytes) override {
    constexpr size_t kAlignBytes = 4096;  // torch aligns to 512 (CUDA) or 64 (CPU) bytes
    auto slab = std::make_shared<TorchSlab>();
    py::gil_scoped_acquire locked;
    dlpack::Held held = dlpack::hold(allocate_(size_bytes + kAlignBytes));
    auto* begin = static_cast<std::byte*>(held.tensor.data);
    slab->data = begin + (kAlignBytes - reinterpret_cast<uintptr_t>(begin) % kAlignBytes) % kAlignBytes;
    slab->size_bytes = size_bytes;
    slab->id = next_id_.fetch_add(1, std::memory_order_relaxed);
    slab->owner = std::move(held.owner);
    return slab;
  }

 private:
  struct TorchSlab final : Slab {
    std::shared_ptr<void> owner;
  };
  py::function allocate_;
  std::atomic<uint32_t> next_id_{0};
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

// A tensor over the lease's bytes from `offset_bytes` on. It owns the lease, so a lease whose object was dropped
// lives as long as its tensors do.
inline py::object lease_tensor(const LeaseRef& lease, const std::string& dtype_name, std::vector<int64_t> shape,
                               size_t offset_bytes) {
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

inline void release_lease(Lease& self, py::handle after) {
  EventRef event = optional_argument<Event>(after, "after", "an Event");
  const StreamRef caller = event == nullptr ? current_stream(self.device()) : nullptr;
  py::gil_scoped_release unlocked;
  if (caller != nullptr && self.is_live()) {
    if (is_capturing(*caller)) {
      throw CaptureError("release of lease '" + self.key() +
                         "' while a CUDA graph is captured in the current stream: replays would use its bytes; "
                         "release it after the capture, when the graph is not replayed any more");
    }
    event = caller->record();  // CUDA: what the caller has enqueued may not have run yet
  }
  self.release(std::move(event));
}

inline void bind_pool(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<PoolStats>(m, "PoolStats")
      .def_readonly("reserved_bytes", &PoolStats::reserved_bytes)
      .def_readonly("live_bytes", &PoolStats::live_bytes)
      .def_readonly("high_water_bytes", &PoolStats::high_water_bytes)
      .def_readonly("slabs", &PoolStats::slabs)
      .def_readonly("live_leases", &PoolStats::live_leases)
      .def_readonly("acquires", &PoolStats::acquires)
      .def_readonly("reuses", &PoolStats::reuses)
      .def_readonly("waits", &PoolStats::waits)
      .def_readonly("dropped_leases", &PoolStats::dropped_leases);

  py::class_<Lease, LeaseRef>(m, "Lease")
      .def_property_readonly("key", &Lease::key)
      .def_property_readonly("nbytes", &Lease::size_bytes)
      .def_property_readonly("is_live", &Lease::is_live)
      .def_property_readonly("data_ptr", [](const Lease& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("slab_id", [](const Lease& self) { return self.slab()->id; })
      .def_property_readonly("offset_bytes", &Lease::offset_bytes)
      .def("tensor", &lease_tensor, py::arg("dtype"), py::arg("shape"), py::arg("offset_bytes") = 0)
      .def("release", &release_lease, py::arg("after") = py::none())
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
      .def(
          "acquire",
          [](Pool& self, std::string key, int64_t nbytes, py::handle stream) {
            BW_EXPECTS(nbytes >= 0,
                       "acquire of key '" + key + "': nbytes must be at least 0, got " + std::to_string(nbytes));
            StreamRef waiting = optional_argument<Stream>(stream, "stream", "a Stream");
            if (waiting == nullptr) {
              waiting = current_stream(self.device().id());
            }
            py::gil_scoped_release unlocked;
            return self.acquire(std::move(key), static_cast<size_t>(nbytes), waiting);
          },
          py::arg("key"), py::arg("nbytes"), py::arg("stream") = py::none())
      .def(
          "holds",
          [](const Pool& self, py::handle object) {
            const dlpack::Described tensor = dlpack::describe_on_any_device(object, {"tensor"});
            BW_EXPECTS(tensor.is_contiguous(), "the tensor of shape " + tensor.shape_text() + " is not contiguous");
            const auto size_bytes = static_cast<size_t>(tensor.numel) * size_of(tensor.dtype);
            return self.locate(tensor.data, size_bytes).slab != nullptr;
          },
          py::arg("tensor"))
      .def("stats", &Pool::stats)
      .def("check", &Pool::check, Unlocked())
      .def("expect_no_leases", &Pool::expect_no_leases)
      .def("trim", &Pool::trim, Unlocked());
}

}  // namespace bucketwheel
