// Capture of the simulated CUDA device: the work of some streams becomes a graph instead of being run.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

namespace fake_cuda {

using Task = std::function<void()>;

bool is_captured(cudaStream_t stream);
// Calls that may wait or allocate are refused while something is captured, unless the thread has said "relaxed".
bool is_forbidden();
// Takes the task into the graph if the stream is captured. False: it is not, and the task is left alone.
bool capture_task(cudaStream_t stream, Task& task);
// The stream has waited for captured work, so it takes part from here on.
cudaError_t join_capture(cudaStream_t stream);

}  // namespace fake_cuda
