#include "capture.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

using fake_cuda::Task;

namespace {

// The graph that is being captured; one at a time, as torch.cuda.graph does it.
struct Capture {
  std::atomic<bool> is_active{false};  // whether there is a graph: what most calls want to know
  std::mutex mutex;
  std::vector<Task>* graph = nullptr;
  std::vector<cudaStream_t> streams;  // that take part

  bool has(cudaStream_t stream) const {
    return graph != nullptr && std::find(streams.begin(), streams.end(), stream) != streams.end();
  }
};
Capture& capture() {
  static auto* const one = new Capture();
  return *one;
}

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

}  // namespace

namespace fake_cuda {

bool is_captured(cudaStream_t stream) {
  if (!capture().is_active) {
    return false;
  }
  std::lock_guard lock(capture().mutex);
  return capture().has(stream);
}

bool is_forbidden() {
  if (!capture().is_active) {
    return false;
  }
  std::lock_guard lock(capture().mutex);
  return capture().graph != nullptr && capture_mode != cudaStreamCaptureModeRelaxed;
}

bool capture_task(cudaStream_t stream, Task& task) {
  if (!capture().is_active) {
    return false;
  }
  std::lock_guard lock(capture().mutex);
  if (!capture().has(stream)) {
    return false;
  }
  capture().graph->push_back(std::move(task));
  return true;
}

cudaError_t join_capture(cudaStream_t stream) {
  std::lock_guard lock(capture().mutex);
  if (capture().graph == nullptr) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (!capture().has(stream)) {
    capture().streams.push_back(stream);  // the one list of tasks keeps the order
  }
  return cudaSuccess;
}

}  // namespace fake_cuda

// What tests ask for beside the runtime, by ctypes.
extern "C" {
// Captures what the default stream is given from now on.
__attribute__((visibility("default"))) void fake_cuda_begin_capture() {
  std::lock_guard lock(capture().mutex);
  capture().graph = new std::vector<Task>();
  capture().is_active = true;
  capture().streams = {nullptr};
}
__attribute__((visibility("default"))) void* fake_cuda_end_capture() {
  std::lock_guard lock(capture().mutex);
  capture().is_active = false;
  return std::exchange(capture().graph, nullptr);
}
// Replays go in parts, between which somebody else's work is replayed: where a capture is, and the work from there to
// there.
__attribute__((visibility("default"))) size_t fake_cuda_capture_position() {
  std::lock_guard lock(capture().mutex);
  return capture().graph->size();
}
__attribute__((visibility("default"))) void fake_cuda_replay_range(void* graph, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    (*static_cast<std::vector<Task>*>(graph))[i]();
  }
}
__attribute__((visibility("default"))) void fake_cuda_free_graph(void* graph) {
  delete static_cast<std::vector<Task>*>(graph);
}
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = fake_cuda::is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
