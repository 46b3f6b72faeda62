#include "device/cuda_api.h"

#include <atomic>

#include "base/error.h"

namespace bucketwheel {
namespace {

std::atomic<const CudaApi*> installed{nullptr};
std::atomic<bool> poses_as_cuda{false};
thread_local void* current_posed_stream = nullptr;

}  // namespace

void install_cuda_api(const CudaApi* api) {
  if (api->version != CudaApi::kVersion || api->size_bytes != sizeof(CudaApi)) {
    throw DeviceError("the CUDA module has interface " + std::to_string(api->version) + " (" +
                      std::to_string(api->size_bytes) + " bytes), this module " + std::to_string(CudaApi::kVersion) +
                      " (" + std::to_string(sizeof(CudaApi)) + "): they were built from different sources");
  }
  installed = api;
}

bool has_cuda_api() { return installed.load(std::memory_order_acquire) != nullptr; }

const CudaApi& cuda_api() {
  const CudaApi* api = installed.load(std::memory_order_acquire);
  if (api == nullptr) {
    throw DeviceError("the CUDA module is not loaded: bucketwheel.native.modules.cuda() builds and loads it");
  }
  return *api;
}

bool is_posing() { return poses_as_cuda.load(std::memory_order_relaxed); }

void set_posing(bool poses) {
  BW_EXPECTS(!poses || cuda_api().is_simulated, "CPU tensors cannot pose as CUDA tensors of a real device");
  poses_as_cuda = poses;
}

void* posed_stream() { return current_posed_stream; }

void set_posed_stream(void* native) { current_posed_stream = native; }

void expect_cuda_success(const char* call, int error) {
  if (error != kCudaSuccess) {
    throw DeviceError(std::string("CUDA call ") + call + " failed: " + cuda_api().error_text(error) + " (" +
                      std::to_string(error) + ")");
  }
}

}  // namespace bucketwheel
