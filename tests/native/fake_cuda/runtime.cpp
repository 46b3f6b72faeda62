// Streams, events and memory of the simulated CUDA device. Contract: cuda_runtime_api.h.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "capture.h"
#include "cuda_runtime_api.h"
#include "queues.h"

using fake_cuda::Mark;
using fake_cuda::MarkRef;
using fake_cuda::Task;

namespace {

std::atomic<uint64_t> delay_seed{0};
std::atomic<bool> drops_work{false};

class Worker {
 public:
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      is_closed_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  void push(Task task) {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

 private:
  void work() {
    uint64_t state = delay_seed * 0x9E3779B97F4A7C15u + reinterpret_cast<uintptr_t>(this);
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_closed_ || !tasks_.empty(); });
        if (tasks_.empty()) {
          return;
        }
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (delay_seed != 0) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        if ((state >> 60) % 4 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds((state >> 40) % 300));
        }
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_closed_ = false;
  std::thread thread_;
};

thread_local int current_device = 0;

std::atomic<size_t> allocated_bytes{0};
std::atomic<size_t> capacity_bytes{size_t{1} << 40};
std::mutex sizes_mutex;
std::vector<std::pair<void*, size_t>>& sizes() {
  static auto* const list = new std::vector<std::pair<void*, size_t>>();
  return *list;
}

// Page-locked memory, by its beginning.
std::set<const void*>& page_locked() {
  static auto* const set = new std::set<const void*>();
  return *set;
}
bool is_page_locked(const void* data) {
  std::lock_guard lock(sizes_mutex);
  return page_locked().count(data) != 0;
}

}  // namespace

struct CUstream_st {
  Worker worker;
};
struct CUevent_st {
  std::mutex mutex;
  MarkRef mark;
};

namespace fake_cuda {

int enqueue(cudaStream_t stream, Task work) {
  if (drops_work || capture_task(stream, work)) {
    return cudaSuccess;
  }
  if (is_checked()) {
    push_work(stream, std::move(work));
  } else if (stream == nullptr) {
    work();
  } else {
    stream->worker.push(std::move(work));
  }
  return cudaSuccess;
}

}  // namespace fake_cuda

// What tests ask for beside the runtime, by ctypes.
extern "C" {
__attribute__((visibility("default"))) void fake_cuda_set_delays(uint64_t seed) { delay_seed = seed; }
// Streams run functions of the host at once and do nothing else that they are given, and every event is complete: what is
// left of a call is its caller's. Not while anything is in a stream.
__attribute__((visibility("default"))) void fake_cuda_drop_work(int drops) { drops_work = drops != 0; }
__attribute__((visibility("default"))) void fake_cuda_set_capacity(size_t size_bytes) { capacity_bytes = size_bytes; }
__attribute__((visibility("default"))) size_t fake_cuda_allocated_bytes() { return allocated_bytes; }
// For a library that has no headers of ours: work at the end of a stream, as cudaLaunchHostFunc puts it there.
__attribute__((visibility("default"))) int fake_cuda_launch_host(void* stream, void (*function)(void*),
                                                                 void* argument) {
  return cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), function, argument);
}
__attribute__((visibility("default"))) int fake_cuda_is_captured(void* stream) {
  return fake_cuda::is_captured(static_cast<cudaStream_t>(stream)) ? 1 : 0;
}
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device != 0) {
    return cudaErrorInvalidDevice;
  }
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;  // multiprocessors
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = capacity_bytes;
  *free_bytes = capacity_bytes - allocated_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t size_bytes) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (allocated_bytes.fetch_add(size_bytes) + size_bytes > capacity_bytes) {
    allocated_bytes -= size_bytes;
    return cudaErrorMemoryAllocation;
  }
  *data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*data == MAP_FAILED) {
    allocated_bytes -= size_bytes;
    return cudaErrorMemoryAllocation;
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::forget(*data, size_bytes);
  }
  std::lock_guard lock(sizes_mutex);
  sizes().emplace_back(*data, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (data == nullptr) {
    return cudaSuccess;
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::synchronize_device();  // as cudaFree does
  }
  std::lock_guard lock(sizes_mutex);
  for (auto& entry : sizes()) {
    if (entry.first == data) {
      munmap(data, entry.second);
      allocated_bytes -= entry.second;
      entry = sizes().back();
      sizes().pop_back();
      return cudaSuccess;
    }
  }
  return cudaErrorInvalidValue;
}
cudaError_t cudaHostAlloc(void** data, size_t size_bytes, unsigned) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  *data = std::malloc(size_bytes);
  std::lock_guard lock(sizes_mutex);
  page_locked().insert(*data);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::lock_guard lock(sizes_mutex);
  page_locked().erase(data);
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (is_page_locked(from)) {
    fake_cuda::access_on_host(from, size_bytes, true, "its stores");
  }
  return static_cast<cudaError_t>(fake_cuda::enqueue(stream, [=] {
    fake_cuda::access(from, size_bytes, false, "memcpy_async");
    fake_cuda::access(to, size_bytes, true, "memcpy_async");
    std::memmove(to, from, size_bytes);
  }));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::synchronize(cudaStream_t{nullptr});
    fake_cuda::access_on_host(from, size_bytes, false, "memcpy_blocking");
    fake_cuda::access_on_host(to, size_bytes, true, "memcpy_blocking");
  }
  std::memmove(to, from, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t size_bytes, cudaStream_t stream) {
  return static_cast<cudaError_t>(fake_cuda::enqueue(stream, [=] {
    fake_cuda::access(data, size_bytes, true, "memset_async");
    std::memset(data, value, size_bytes);
  }));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking || priority > 0 || priority < -5) {
    return cudaErrorInvalidValue;
  }
  *stream = new CUstream_st();
  return cudaSuccess;
}
// What is queued still runs; the real one returns at once, this one waits for it.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (fake_cuda::is_checked()) {
    fake_cuda::remove_queue(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::synchronize(stream);
    return cudaSuccess;
  }
  auto mark = std::make_shared<Mark>();
  fake_cuda::enqueue(stream, [mark] { mark->complete(); });
  mark->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  MarkRef mark;
  {
    std::lock_guard lock(event->mutex);
    mark = event->mark;
  }
  if (mark == nullptr) {
    return cudaSuccess;  // never recorded: no wait, as CUDA has it
  }
  if (mark->captured.capture != 0) {
    return fake_cuda::join_capture(stream, mark->captured);
  }
  if (fake_cuda::is_captured(stream)) {
    return fake_cuda::invalidate_capture();  // a graph cannot wait for what is outside, be it done or not
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::push_wait(stream, mark);
    return cudaSuccess;
  }
  if (mark->query()) {
    return cudaSuccess;
  }
  return static_cast<cudaError_t>(fake_cuda::enqueue(stream, [mark] { mark->wait(); }));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (drops_work) {
    event->mark.reset();
    return cudaSuccess;
  }
  auto mark = std::make_shared<Mark>();
  mark->captured = fake_cuda::capture_point(stream);
  {
    std::lock_guard lock(event->mutex);
    event->mark = mark;
  }
  if (mark->captured.capture != 0) {
    return cudaSuccess;  // a place in the graph, with no completion outside of it
  }
  if (fake_cuda::is_checked()) {
    fake_cuda::push_record(stream, mark);
    return cudaSuccess;
  }
  if (stream == nullptr) {  // what it was given has run
    mark->complete();
    return cudaSuccess;
  }
  return static_cast<cudaError_t>(fake_cuda::enqueue(stream, [mark] { mark->complete(); }));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  std::lock_guard lock(event->mutex);
  Mark* const mark = event->mark.get();
  const bool is_done = mark == nullptr || (fake_cuda::is_checked() ? fake_cuda::query(*mark) : mark->query());
  return is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (fake_cuda::is_forbidden()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  MarkRef mark;
  {
    std::lock_guard lock(event->mutex);
    mark = event->mark;
  }
  if (mark != nullptr && fake_cuda::is_checked()) {
    fake_cuda::synchronize(mark);
  } else if (mark != nullptr) {
    mark->wait();
  }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  if (drops_work) {  // the library's own: references that end with the work before
    function(argument);
  }
  return static_cast<cudaError_t>(fake_cuda::enqueue(stream, [=] { function(argument); }));
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  static constexpr std::pair<cudaError_t, const char*> kTexts[] = {
      {cudaSuccess, "no error"},
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorInvalidConfiguration, "invalid configuration argument"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorLaunchFailure, "unspecified launch failure"},
      {cudaErrorNotSupported, "operation not supported"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
      {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
  };
  for (const auto& [known, text] : kTexts) {
    if (known == error) {
      return text;
    }
  }
  return "unknown error";
}
