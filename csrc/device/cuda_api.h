// The CUDA runtime and our CUDA kernels as one replaceable table of functions.
//
// bucketwheel._cpu is compiled without CUDA. bucketwheel._cuda (nvcc, static cudart) fills a CudaApi and hands it over
// in a capsule; tests hand over another one. Every CUDA call of this library goes through the installed table.
//
// Types are those of the C ABI: an int is a cudaError_t (0: success, 600: not ready), a void* stream is a cudaStream_t
// (null: the legacy default stream), a void* event is a cudaEvent_t.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bucketwheel {

struct AdamLaunch;
struct AdamScalarsLaunch;
struct SumsqLaunch;
struct AccumulateLaunch;
struct FoldLaunch;
struct ParamSumsLaunch;
struct RankSumsLaunch;
struct ClipLaunch;
struct CopyLaunch;
struct ReduceLaunch;

// X(name, parameters): each returns a cudaError_t. The kernels' launchers end with the stream.
#define BW_CUDA_CALLS(X)                                                              \
  X(get_device_count, (int* count))                                                   \
  X(get_device, (int* device))                                                        \
  X(set_device, (int device))                                                         \
  X(get_multiprocessors, (int device, int* count))                                    \
  X(mem_get_info, (size_t* free_bytes, size_t* total_bytes))                          \
  X(malloc_device, (void** data, size_t size_bytes))                                  \
  X(free_device, (void* data))                                                        \
  X(malloc_host, (void** data, size_t size_bytes))                                    \
  X(memcpy_async, (void* to, const void* from, size_t size_bytes, void* stream))      \
  X(memcpy_blocking, (void* to, const void* from, size_t size_bytes))                 \
  X(memset_async, (void* data, int value, size_t size_bytes, void* stream))           \
  X(stream_create, (void** stream, bool high_priority)) /* non-blocking */            \
  X(stream_destroy, (void* stream))                                                   \
  X(stream_synchronize, (void* stream))                                               \
  X(stream_wait_event, (void* stream, void* event))                                   \
  X(stream_capture_id, (void* stream, uint64_t* id)) /* 0: it is not captured */      \
  X(exchange_capture_mode, (int* mode))              /* of this thread; 2: relaxed */ \
  X(event_create, (void** event, bool timing))                                        \
  X(event_destroy, (void* event))                                                     \
  X(event_record, (void* event, void* stream))                                        \
  X(event_query, (void* event))                                                       \
  X(event_synchronize, (void* event))                                                 \
  X(event_elapsed_ms, (float* ms, void* start, void* end))                            \
  X(launch_host_function, (void* stream, void (*function)(void*), void* argument))    \
  X(launch_adam, (const AdamLaunch& launch, void* stream))                            \
  X(launch_adam_scalars, (const AdamScalarsLaunch& launch, void* stream))             \
  X(launch_sumsq, (const SumsqLaunch& launch, void* stream))                          \
  X(launch_accumulate, (const AccumulateLaunch& launch, void* stream))                \
  X(launch_fold, (const FoldLaunch& launch, void* stream))                            \
  X(launch_param_sums, (const ParamSumsLaunch& launch, void* stream))                 \
  X(launch_rank_sums, (const RankSumsLaunch& launch, void* stream))                   \
  X(launch_clip, (const ClipLaunch& launch, void* stream))                            \
  X(launch_copy, (const CopyLaunch& launch, void* stream))                            \
  X(launch_reduce, (const ReduceLaunch& launch, void* stream))

struct CudaApi {
  static constexpr uint32_t kVersion = 9;  // of this table and of every struct it passes
  uint32_t version = kVersion;
  uint32_t size_bytes = sizeof(CudaApi);
  bool is_simulated = false;  // device memory is host memory, and tensors on the CPU may pose as CUDA tensors (tests)
  const char* (*error_text)(int error) = nullptr;
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define BW_CUDA_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BW_CUDA_CALLS(BW_CUDA_MEMBER)
#undef BW_CUDA_MEMBER
};

inline constexpr int kCudaBlockThreads = 256;  // of every kernel of ours
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaOutOfMemory = 2;
inline constexpr int kCudaNotReady = 600;

// The name of the capsule in which _cuda hands its table over.
inline constexpr const char* kCudaApiCapsule = "bucketwheel.cuda_api";

// Makes `api` the table, which must live as long as the process. DeviceError when it is of another version.
void install_cuda_api(const CudaApi* api);
bool has_cuda_api();
// DeviceError when no table is installed, that is, `bucketwheel.native.modules.cuda()` was not called.
const CudaApi& cuda_api();
// Whether CPU tensors count as tensors of CUDA device 0. Only with a simulated table, else ValueError.
bool is_posing();
void set_posing(bool poses);
// While they do: torch's current stream in the calling thread. Null, as at first: the thread itself.
void* posed_stream();
void set_posed_stream(void* native);

// DeviceError naming the call unless it succeeded.
void expect_cuda_success(const char* call, int error);

}  // namespace bucketwheel

// The error code of a call through the installed table; BW_CUDA_TRY throws it.
#define BW_CUDA_CALL(name, ...) ::bucketwheel::cuda_api().name(__VA_ARGS__)
#define BW_CUDA_TRY(name, ...) ::bucketwheel::expect_cuda_success(#name, BW_CUDA_CALL(name, __VA_ARGS__))
