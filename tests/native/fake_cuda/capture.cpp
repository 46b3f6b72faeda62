#include "capture.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

using fake_cuda::Task;

namespace {

struct Node {
  Task task;
  size_t stream = 0;           // its number in the capture
  std::vector<size_t> behind;  // how much of each stream's work has to be done before
};

struct Graph {
  std::vector<Node> nodes;    // in the order of the calls
  std::vector<bool> is_done;  // in the replay that goes on

  // Runs a node, and before it what it waits for.
  void run(size_t index) {
    std::vector<size_t> counts(nodes[index].behind.size(), 0);
    for (size_t i = 0; i < index; ++i) {
      const size_t stream = nodes[i].stream;
      if (stream < counts.size() && counts[stream]++ < nodes[index].behind[stream] && !is_done[i]) {
        run_one(i);
      }
    }
    run_one(index);
  }
  void run_one(size_t index) {
    if (!is_done[index]) {
      is_done[index] = true;
      nodes[index].task();
    }
  }
};

struct CapturedStream {
  cudaStream_t stream = nullptr;
  size_t count = 0;            // of its work
  std::vector<size_t> behind;  // what its next work comes behind
};

// The graph that is being captured; one at a time, as torch.cuda.graph does it.
struct Capture {
  std::atomic<bool> is_active{false};  // whether there is a graph: what most calls want to know
  std::mutex mutex;
  uint64_t number = 0;
  Graph* graph = nullptr;
  std::vector<CapturedStream> streams;  // that take part; the first is the one that was told to
  bool is_invalid = false;
  cudaError_t error = cudaSuccess;  // of the last capture that ended

  CapturedStream* find(cudaStream_t stream) {
    const auto at = std::find_if(streams.begin(), streams.end(), [&](const auto& one) { return one.stream == stream; });
    return graph == nullptr || at == streams.end() ? nullptr : &*at;
  }
  void add(CapturedStream& stream, Task task) {
    const auto number = static_cast<size_t>(&stream - streams.data());
    graph->nodes.push_back({std::move(task), number, stream.behind});
    stream.behind.resize(std::max(stream.behind.size(), number + 1));
    stream.behind[number] = ++stream.count;
  }
  // cudaStreamEndCapture's.
  cudaError_t find_fault() {
    if (is_invalid) {
      return cudaErrorStreamCaptureInvalidated;
    }
    std::vector<size_t>& joined = streams.front().behind;
    joined.resize(streams.size());
    for (size_t i = 0; i < streams.size(); ++i) {
      if (joined[i] < streams[i].count) {
        return cudaErrorStreamCaptureUnjoined;
      }
    }
    return cudaSuccess;
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
  return capture().find(stream) != nullptr;
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
  CapturedStream* const captured = capture().find(stream);
  if (captured == nullptr) {
    return false;
  }
  capture().add(*captured, std::move(task));
  return true;
}

CapturePoint capture_point(cudaStream_t stream) {
  std::lock_guard lock(capture().mutex);
  const CapturedStream* const captured = capture().find(stream);
  return captured == nullptr ? CapturePoint{} : CapturePoint{capture().number, captured->behind};
}

cudaError_t join_capture(cudaStream_t stream, const CapturePoint& point) {
  std::lock_guard lock(capture().mutex);
  if (capture().graph == nullptr) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (point.capture != capture().number) {
    capture().is_invalid = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (capture().find(stream) == nullptr) {
    capture().streams.push_back({stream, 0, {}});
  }
  std::vector<size_t>& behind = capture().find(stream)->behind;
  behind.resize(std::max(behind.size(), point.behind.size()));
  for (size_t i = 0; i < point.behind.size(); ++i) {
    behind[i] = std::max(behind[i], point.behind[i]);
  }
  return cudaSuccess;
}

cudaError_t invalidate_capture() {
  std::lock_guard lock(capture().mutex);
  capture().is_invalid = true;
  return cudaErrorStreamCaptureIsolation;
}

}  // namespace fake_cuda

// What tests ask for beside the runtime, by ctypes.
extern "C" {
// Captures what the default stream is given from now on.
__attribute__((visibility("default"))) void fake_cuda_begin_capture() {
  std::lock_guard lock(capture().mutex);
  capture().graph = new Graph();
  capture().number += 1;
  capture().is_invalid = false;
  capture().is_active = true;
  capture().streams = {CapturedStream{}};
}
__attribute__((visibility("default"))) void* fake_cuda_end_capture() {
  std::lock_guard lock(capture().mutex);
  capture().is_active = false;
  capture().error = capture().find_fault();
  if (capture().error != cudaSuccess) {
    delete std::exchange(capture().graph, nullptr);
  }
  return std::exchange(capture().graph, nullptr);
}
// Why the last capture gave no graph; null where it gave one.
__attribute__((visibility("default"))) const char* fake_cuda_capture_error() {
  std::lock_guard lock(capture().mutex);
  return capture().error == cudaSuccess ? nullptr : cudaGetErrorString(capture().error);
}
__attribute__((visibility("default"))) void fake_cuda_free_graph(void* graph) { delete static_cast<Graph*>(graph); }
// Replays go in parts, between which torch's work is replayed: a place in the default stream's work. A replay runs what
// has to be done before the place, and the rest as late as it may: what nothing waits for is not done, so a missing edge
// shows as wrong data.
__attribute__((visibility("default"))) size_t fake_cuda_capture_mark() {
  std::lock_guard lock(capture().mutex);
  capture().add(capture().streams.front(), [] {});
  return capture().graph->nodes.size() - 1;
}
__attribute__((visibility("default"))) void fake_cuda_begin_replay(void* graph) {
  auto& of = *static_cast<Graph*>(graph);
  of.is_done.assign(of.nodes.size(), false);
}
__attribute__((visibility("default"))) void fake_cuda_replay_to(void* graph, size_t mark) {
  static_cast<Graph*>(graph)->run(mark);
}
__attribute__((visibility("default"))) void fake_cuda_end_replay(void* graph) {
  auto& of = *static_cast<Graph*>(graph);
  for (size_t i = 0; i < of.nodes.size(); ++i) {
    of.run_one(i);
  }
}
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  const bool is_active = fake_cuda::is_captured(stream);
  *status = is_active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = is_active ? capture().number : 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
