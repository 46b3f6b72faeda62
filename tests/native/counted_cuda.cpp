// counted_cuda.h for tests in Python: tests/support/counted_cuda.py.
#include "counted_cuda.h"

using namespace bucketwheel;

extern "C" {

const void* counted_cuda(const void* api) { return &counted(*static_cast<const CudaApi*>(api)); }
// Null behind the last call.
const char* counted_cuda_name(size_t call) {
  static constexpr const char* kNames[] = {
#define BW_COUNTED_NAME(name, parameters) #name,
      BW_CUDA_CALLS(BW_COUNTED_NAME)
#undef BW_COUNTED_NAME
  };
  return call < kCudaCallCount ? kNames[call] : nullptr;
}
uint64_t counted_cuda_calls(size_t call) { return cuda_calls(static_cast<CudaCall>(call)); }
void counted_cuda_plan(size_t call, uint64_t countdown, int error, int64_t delay_us) {
  plan_cuda_fault({static_cast<CudaCall>(call), countdown, error, delay_us});
}
void counted_cuda_clear() { clear_cuda_faults(); }

}  // extern "C"
