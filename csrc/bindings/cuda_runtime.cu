// The calls of the CUDA runtime behind the table of cuda_api.h, and the table itself. Part of bucketwheel._cuda.
#include <cuda_runtime.h>

#include "base/platform.h"
#include "bindings/cuda_table.h"
#include "device/cuda_api.h"
#include "kernels/adam_cuda.h"
#include "kernels/norm_cuda.h"
#include "kernels/pack_cuda.h"

namespace bucketwheel {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

int get_device_count(int* count) { return cudaGetDeviceCount(count); }
int get_device(int* device) { return cudaGetDevice(device); }
int set_device(int device) { return cudaSetDevice(device); }
int get_multiprocessors(int device, int* count) {
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

int mem_get_info(size_t* free_bytes, size_t* total_bytes) { return cudaMemGetInfo(free_bytes, total_bytes); }
int malloc_device(void** data, size_t size_bytes) { return cudaMalloc(data, size_bytes); }
int free_device(void* data) { return cudaFree(data); }
int malloc_host(void** data, size_t size_bytes) { return cudaHostAlloc(data, size_bytes, cudaHostAllocPortable); }
int memcpy_async(void* to, const void* from, size_t size_bytes, void* stream) {
  return cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, stream_of(stream));
}
int memcpy_blocking(void* to, const void* from, size_t size_bytes) {
  return cudaMemcpy(to, from, size_bytes, cudaMemcpyDefault);
}
int memset_async(void* data, int value, size_t size_bytes, void* stream) {
  return cudaMemsetAsync(data, value, size_bytes, stream_of(stream));
}

int stream_create(void** stream, bool high_priority) {
  int lowest = 0;
  int highest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  return error != cudaSuccess ? error
                              : cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream),
                                                             cudaStreamNonBlocking, high_priority ? highest : lowest);
}
int stream_destroy(void* stream) { return cudaStreamDestroy(stream_of(stream)); }
int stream_synchronize(void* stream) { return cudaStreamSynchronize(stream_of(stream)); }
int stream_wait_event(void* stream, void* event) { return cudaStreamWaitEvent(stream_of(stream), event_of(event), 0); }
int stream_capture_id(void* stream, uint64_t* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long cuda_id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream_of(stream), &status, &cuda_id);
  *id = status == cudaStreamCaptureStatusActive ? cuda_id + 1 : 0;  // CUDA does not say that its ids begin with 1
  return error;
}
int exchange_capture_mode(int* mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
  *mode = static_cast<int>(exchanged);
  return error;
}

int event_create(void** event, bool timing) {
  return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                  timing ? cudaEventDefault : cudaEventDisableTiming);
}
int event_destroy(void* event) { return cudaEventDestroy(event_of(event)); }
int event_record(void* event, void* stream) { return cudaEventRecord(event_of(event), stream_of(stream)); }
int event_query(void* event) {
  const cudaError_t error = cudaEventQuery(event_of(event));
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();  // "not ready" is an answer, not an error that a later launch should report
  }
  return error;
}
int event_synchronize(void* event) { return cudaEventSynchronize(event_of(event)); }
int event_elapsed_ms(float* ms, void* start, void* end) {
  return cudaEventElapsedTime(ms, event_of(start), event_of(end));
}
int launch_host_function(void* stream, void (*function)(void*), void* argument) {
  return cudaLaunchHostFunc(stream_of(stream), function, argument);
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

CudaApi make_table() {
  CudaApi api;
  api.is_simulated = !kIsCompiledByNvcc;
  api.error_text = error_text;
#define BW_CUDA_FILL(name, parameters) api.name = name;
  BW_CUDA_CALLS(BW_CUDA_FILL)
#undef BW_CUDA_FILL
  return api;
}

}  // namespace

const CudaApi& cuda_table() {
  static const CudaApi table = make_table();
  return table;
}

}  // namespace bucketwheel
