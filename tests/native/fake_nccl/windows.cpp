// Memory of the fake, and its registration.
#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>

#include "calls.h"
#include "fake_nccl.h"

using namespace bucketwheel;

namespace fake_nccl {
namespace {

constexpr int64_t kWindowMeeting = 100;

struct Registration {
  NcclCommRef comm;
  uintptr_t begin;
  size_t size_bytes;
};
struct Memory {
  std::mutex mutex;
  uintptr_t last = 0;
  std::map<uintptr_t, size_t> allocated;
  std::map<uintptr_t, Registration> registered;  // windows by handle

  bool holds(uintptr_t begin, size_t size_bytes) const {
    const auto after = allocated.upper_bound(begin);
    if (after == allocated.begin()) {
      return false;
    }
    const auto& [first, bytes] = *std::prev(after);
    return begin + size_bytes <= first + bytes;
  }
  bool is_registered(uintptr_t begin, size_t size_bytes) const {
    for (const auto& [handle, one] : registered) {
      if (begin < one.begin + one.size_bytes && one.begin < begin + size_bytes) {
        return true;
      }
    }
    return false;
  }
};
Memory& memory() {
  static auto* const one = new Memory();
  return *one;
}

#ifndef FAKE_NCCL_WITHOUT_OPTIONAL
size_t whole_pages(size_t size_bytes) {
  return (size_bytes + kNcclWindowAlignment - 1) / kNcclWindowAlignment * kNcclWindowAlignment;
}

// The error of what cannot be registered. The real NCCL leaves the second registration of memory undefined.
int check(uintptr_t begin, size_t size_bytes) {
  const std::string where = "ncclCommWindowRegister: ";
  std::lock_guard lock(memory().mutex);
  if (begin == 0 || size_bytes == 0) {
    return fail(kNcclInvalidArgument, where + "no memory");
  }
  if (begin % kNcclWindowAlignment != 0) {
    return fail(kNcclInvalidArgument, where + "not aligned to 4096 bytes");
  }
  if (!memory().holds(begin, size_bytes)) {
    return fail(kNcclInvalidArgument, where + "not memory of ncclMemAlloc");
  }
  if (memory().is_registered(begin, size_bytes)) {
    return fail(kNcclInvalidUsage, where + "registered already");
  }
  return kNcclSuccess;
}

uintptr_t add(const Registration& one) {
  std::lock_guard lock(memory().mutex);
  const uintptr_t handle = ++memory().last * 4096;
  memory().registered[handle] = one;
  return handle;
}
#endif

}  // namespace

void drop_windows(NcclCommRef comm) {
  std::lock_guard lock(memory().mutex);
  std::erase_if(memory().registered, [&](const auto& entry) { return entry.second.comm == comm; });
}

}  // namespace fake_nccl

FAKE_EXPORT uint64_t fake_nccl_live_windows() {
  std::lock_guard lock(fake_nccl::memory().mutex);
  return fake_nccl::memory().registered.size();
}
FAKE_EXPORT uint64_t fake_nccl_live_bytes() {
  std::lock_guard lock(fake_nccl::memory().mutex);
  uint64_t size_bytes = 0;
  for (const auto& [begin, size] : fake_nccl::memory().allocated) {
    size_bytes += size;
  }
  return size_bytes;
}

#ifndef FAKE_NCCL_WITHOUT_OPTIONAL
namespace bucketwheel {

using namespace fake_nccl;

FAKE_EXPORT int ncclMemAlloc(void** data, size_t size_bytes) {
  if (const int error = enter("ncclMemAlloc")) {
    return error;
  }
  if (data == nullptr || size_bytes == 0) {
    return fail(kNcclInvalidArgument, "ncclMemAlloc: null or no bytes");
  }
  const size_t mapped = whole_pages(size_bytes);
  void* const made = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) {
    return fail(kNcclUnhandledCudaError, "ncclMemAlloc: out of memory");
  }
  std::lock_guard lock(memory().mutex);
  memory().allocated[reinterpret_cast<uintptr_t>(made)] = mapped;
  *data = made;
  return kNcclSuccess;
}

FAKE_EXPORT int ncclMemFree(void* data) {
  if (const int error = enter("ncclMemFree")) {
    return error;
  }
  std::lock_guard lock(memory().mutex);
  const auto found = memory().allocated.find(reinterpret_cast<uintptr_t>(data));
  if (found == memory().allocated.end()) {
    return fail(kNcclInvalidArgument, "ncclMemFree: not memory of ncclMemAlloc");
  }
  if (memory().is_registered(found->first, found->second)) {
    return fail(kNcclInvalidUsage, "ncclMemFree: still registered");
  }
  munmap(data, found->second);
  memory().allocated.erase(found);
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommWindowRegister(NcclCommRef handle, void* data, size_t size_bytes, NcclWindowRef* window,
                                       int flags) {
  CommPtr comm;
  if (const int error = enter_with("ncclCommWindowRegister", handle, &comm)) {
    return error;
  }
  if (const int error = comm->tell_error()) {
    return error;
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (const int error = check(begin, size_bytes)) {
    return error;
  }
  if (window == nullptr || (flags != kNcclWindowDefault && flags != kNcclWindowSymmetric)) {
    return fail(kNcclInvalidArgument, "ncclCommWindowRegister: window is null, or unknown flags");
  }
  int error = 0;
  if (!meet(*comm, "ncclCommWindowRegister", {{kWindowMeeting, static_cast<int64_t>(size_bytes)}}, &error)) {
    return error;
  }
  for (int rank = 0; rank < comm->world; ++rank) {
    const int64_t other = comm->board->notice(Lane::kHost, rank, 0).values[1];
    if (other != static_cast<int64_t>(size_bytes)) {
      return fail(kNcclInvalidArgument, "ncclCommWindowRegister: " + std::to_string(size_bytes) + " bytes, but " +
                                            std::to_string(other) + " on rank " + std::to_string(rank));
    }
  }
  *window = are_windows_null() ? nullptr : reinterpret_cast<NcclWindowRef>(add({handle, begin, size_bytes}));
  return kNcclSuccess;
}
FAKE_EXPORT int ncclCommWindowDeregister(NcclCommRef handle, NcclWindowRef window) {
  CommPtr comm;
  if (const int error = enter_with("ncclCommWindowDeregister", handle, &comm)) {
    return error;
  }
  std::lock_guard lock(memory().mutex);
  const auto found = memory().registered.find(reinterpret_cast<uintptr_t>(window));
  if (found == memory().registered.end() || found->second.comm != handle) {
    return fail(kNcclInvalidArgument, "ncclCommWindowDeregister: not registered with this communicator");
  }
  memory().registered.erase(found);
  return kNcclSuccess;
}

}  // namespace bucketwheel
#endif
