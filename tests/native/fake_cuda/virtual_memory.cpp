// Virtual memory of the simulated CUDA device. Contract: cuda.h.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "capture.h"
#include "cuda.h"
#include "queues.h"

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

// What a handle stands for.
struct Memory {
  size_t size_bytes;
  int uses = 1;  // of its handle, and where it is mapped; it goes with the last one
};
struct Range {
  size_t size_bytes;
  Memory* mapped = nullptr;
};

std::mutex mutex;
std::map<CUdeviceptr, Range>& ranges() {
  static auto* const made = new std::map<CUdeviceptr, Range>();
  return *made;
}

// The whole reserved range at `address`, if it is mapped or not as asked for: parts of one are not simulated.
Range* range_at(CUdeviceptr address, size_t size_bytes, bool is_mapped) {
  const auto found = ranges().find(address);
  const bool fits = found != ranges().end() && found->second.size_bytes == size_bytes;
  return fits && (found->second.mapped != nullptr) == is_mapped ? &found->second : nullptr;
}

void end_use(Memory* memory) {
  if (--memory->uses == 0) {
    fake_cuda::give_bytes(memory->size_bytes);
    delete memory;
  }
}

bool is_on_this_device(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id == 0;
}

void* inaccessible(void* address, size_t size_bytes, int flags) {
  return mmap(address, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

}  // namespace

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size_bytes, size_t, CUdeviceptr, unsigned long long) {
  void* const reserved = size_bytes % kGranularity == 0 ? inaccessible(nullptr, size_bytes, 0) : MAP_FAILED;
  if (reserved == MAP_FAILED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  std::lock_guard lock(mutex);
  ranges()[*address] = {size_bytes};
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size_bytes) {
  std::lock_guard lock(mutex);
  if (range_at(address, size_bytes, false) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(reinterpret_cast<void*>(address), size_bytes);
  ranges().erase(address);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size_bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  if (fake_cuda::is_forbidden()) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (!is_on_this_device(properties->location) || size_bytes % kGranularity != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!fake_cuda::take_bytes(size_bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Memory{size_bytes});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(mutex);
  end_use(reinterpret_cast<Memory*>(handle));
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  std::lock_guard lock(mutex);
  Range* const range = range_at(address, size_bytes, false);
  auto* const memory = reinterpret_cast<Memory*>(handle);
  if (range == nullptr || offset != 0 || memory->size_bytes != size_bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  range->mapped = memory;
  memory->uses += 1;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size_bytes) {
  std::lock_guard lock(mutex);
  Range* const range = range_at(address, size_bytes, true);
  if (range == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  fake_cuda::access_on_host(reinterpret_cast<void*>(address), size_bytes, true, "cuMemUnmap");
  inaccessible(reinterpret_cast<void*>(address), size_bytes, MAP_FIXED);  // with new pages when access is set again
  end_use(std::exchange(range->mapped, nullptr));
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc* access, size_t count) {
  std::lock_guard lock(mutex);
  if (range_at(address, size_bytes, true) == nullptr || count != 1 || !is_on_this_device(access->location)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int error = mprotect(reinterpret_cast<void*>(address), size_bytes, PROT_READ | PROT_WRITE);
  return error == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
#define BW_ENTRY(name)                                                                                 \
  if (std::strcmp(symbol, #name) == 0) {                                                               \
    *function = reinterpret_cast<void*>(&(name));                                                      \
    *result = version < 10020 ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess; \
  }
  BW_ENTRY(cuMemGetAllocationGranularity)
  BW_ENTRY(cuMemAddressReserve)
  BW_ENTRY(cuMemAddressFree)
  BW_ENTRY(cuMemCreate)
  BW_ENTRY(cuMemRelease)
  BW_ENTRY(cuMemMap)
  BW_ENTRY(cuMemUnmap)
  BW_ENTRY(cuMemSetAccess)
#undef BW_ENTRY
  return cudaSuccess;
}
