#include "comm/nccl/memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"

namespace bucketwheel {

namespace {

constexpr std::chrono::seconds kStuckPatience{1};

}  // namespace

// What the slabs, which may outlive the communicator, share with it.
struct NcclMemory::Windows {
  explicit Windows(std::shared_ptr<NcclSession> session) : session(std::move(session)) {}
  struct Entry {
    uint32_t slab;
    std::byte* data;
    size_t size_bytes;
    bool is_tried = false;
    NcclWindowRef window = nullptr;
  };
  // With the lock held. The window of memory that is about to be freed. False: it has not ended, for a thread is stuck
  // inside NCCL; the communicator's end takes its windows with it.
  bool end(Entry& entry) noexcept {
    if (entry.window == nullptr || session->is_forked()) {
      return true;
    }
    try {
      const std::unique_lock lock = session->lock_for(kStuckPatience);
      if (!lock) {
        return false;
      }
      CudaGuard guard(session->device());
      const RelaxedCapture relaxed;
      if (session->comm() != nullptr) {
        (void)BW_NCCL_CALL(session->api(), comm_window_deregister, session->comm(), entry.window);
      }
    } catch (const std::exception&) {  // the driver is gone
    }
    entry.window = nullptr;
    return true;
  }

  const std::shared_ptr<NcclSession> session;
  std::mutex ending;  // held while slabs are registered, which waits for peers, and while one is freed; taken first
  std::mutex mutex;   // of the rest
  std::vector<Entry> entries;
  uint32_t next_slab = 0;
};

struct NcclMemory::NcclSlab final : Slab {
  explicit NcclSlab(std::shared_ptr<Windows> windows) : windows(std::move(windows)) {}
  ~NcclSlab() override {
    if (data == nullptr || windows->session->is_forked()) {
      return;
    }
    bool has_ended = true;
    {
      std::lock_guard ending_lock(windows->ending);
      std::lock_guard lock(windows->mutex);
      const auto found = std::ranges::find(windows->entries, id, &Windows::Entry::slab);
      if (found != windows->entries.end()) {
        has_ended = windows->end(*found);
        windows->entries.erase(found);
      }
    }
    if (!has_ended) {
      return;  // the memory stays: peers may reach it
    }
    try {
      CudaGuard guard(windows->session->device());
      const RelaxedCapture relaxed;
      (void)BW_NCCL_CALL(windows->session->api(), mem_free, data);
    } catch (const std::exception&) {  // the driver is gone, and the memory with it
    }
  }
  const std::shared_ptr<Windows> windows;
};

NcclMemory::NcclMemory(std::shared_ptr<NcclSession> session)
    : session_(std::move(session)), windows_(std::make_shared<Windows>(session_)) {
  BW_EXPECTS(session_->api().features.windows,
             "registered memory needs NCCL 2.27 or newer with ncclMemAlloc and ncclCommWindowRegister; this one is " +
                 nccl_version_text(session_->api().version) + " (" + session_->api().path + ")");
}

NcclMemory::~NcclMemory() { release_windows(); }

SlabRef NcclMemory::allocate(size_t size_bytes) {
  auto slab = std::make_shared<NcclSlab>(windows_);
  size_bytes = (size_bytes + kNcclWindowAlignment - 1) / kNcclWindowAlignment * kNcclWindowAlignment;
  CudaGuard guard(session_->device());
  const RelaxedCapture relaxed;  // somebody may be capturing something else
  void* data = nullptr;
  const NcclApi& nccl = session_->api();
  if (BW_NCCL_CALL(nccl, mem_alloc, &data, size_bytes) != kNcclSuccess) {  // in general: there is no memory left
    const std::string reclaimed = reclaim_cuda_memory(session_->device());
    if (const int result = BW_NCCL_CALL(nccl, mem_alloc, &data, size_bytes); result != kNcclSuccess) {
      throw PoolError("a slab of " + std::to_string(size_bytes) +
                      " bytes: " + nccl_error(nccl, NcclCall::mem_alloc, result).what() + "; " + reclaimed +
                      ": use smaller buckets, or less memory elsewhere");
    }
  }
  slab->data = static_cast<std::byte*>(data);
  slab->size_bytes = size_bytes;
  {
    std::lock_guard lock(windows_->mutex);
    slab->id = windows_->next_slab++;
    windows_->entries.push_back({slab->id, slab->data, size_bytes});
  }
  CudaDevice::at(session_->device()).fill(slab->data, 0, size_bytes, nullptr);
  return slab;
}

std::vector<size_t> NcclMemory::new_slabs() const {
  std::lock_guard lock(windows_->mutex);
  std::vector<size_t> sizes;
  for (const auto& entry : windows_->entries) {
    if (!entry.is_tried) {
      sizes.push_back(entry.size_bytes);
    }
  }
  return sizes;
}

size_t NcclMemory::register_slabs(size_t count) {
  std::lock_guard ending_lock(windows_->ending);
  std::vector<Windows::Entry> fresh;
  {
    std::lock_guard lock(windows_->mutex);
    for (const Windows::Entry& entry : windows_->entries) {
      if (!entry.is_tried && fresh.size() < count) {
        fresh.push_back(entry);
      }
    }
  }
  size_t granted = 0;
  for (Windows::Entry& entry : fresh) {
    {
      std::lock_guard lock(session_->mutex());
      if (session_->comm() == nullptr) {
        throw CommError("the communicator has ended");
      }
      BW_NCCL_TRY(session_->api(), comm_window_register, session_->comm(), entry.data, entry.size_bytes, &entry.window,
                  kNcclWindowSymmetric);
    }
    std::lock_guard lock(windows_->mutex);
    const auto found = std::ranges::find(windows_->entries, entry.slab, &Windows::Entry::slab);
    found->is_tried = true;
    found->window = entry.window;
    granted += entry.window != nullptr ? 1 : 0;
  }
  return granted;
}

bool NcclMemory::is_registered() const {
  std::lock_guard lock(windows_->mutex);
  return !windows_->entries.empty() &&
         std::ranges::all_of(windows_->entries, [](const auto& entry) { return entry.window != nullptr; });
}

void NcclMemory::release_windows() noexcept {
  std::lock_guard lock(windows_->mutex);
  for (auto& entry : windows_->entries) {
    (void)windows_->end(entry);
  }
}

}  // namespace bucketwheel
