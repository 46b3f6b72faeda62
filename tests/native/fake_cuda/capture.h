// Capture of the simulated CUDA device: the work of some streams becomes a graph instead of being run.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda_runtime_api.h"

namespace fake_cuda {

using Task = std::function<void()>;

bool is_captured(cudaStream_t stream);
// Calls that may wait or allocate are refused while something is captured, unless the thread has said "relaxed".
bool is_forbidden();
// Takes the task into the graph if the stream is captured. False: it is not, and the task is left alone.
bool capture_task(cudaStream_t stream, Task& task);
// How far a captured stream has come, for events: the capture, and how much of the work of each of its streams is behind
// this point. Capture 0: the stream is not captured.
struct CapturePoint {
  uint64_t capture = 0;
  std::vector<size_t> behind;
};
CapturePoint capture_point(cudaStream_t stream);
// The stream has waited for captured work, so it takes part from here on. An error if that is of another capture.
cudaError_t join_capture(cudaStream_t stream, const CapturePoint& point);
// The stream, which is captured, was to wait for work that is not: there will be no graph.
cudaError_t invalidate_capture();

}  // namespace fake_cuda
