// The scalars of launch_adam(), made on the device: so the host waits for nothing, and each replay of a graph takes a
// new step count, learning rate and clip coefficient.
#include "kernels/adam_cuda.h"
#include "kernels/launch_cuda.h"

namespace bucketwheel {
namespace {

// One block, because the counted steps must be seen by all threads before scalars are made of them.
__global__ void __launch_bounds__(kBlockThreads) adam_scalars_kernel(const __grid_constant__ AdamScalarsLaunch launch) {
  const bool is_noop = launch.noop != nullptr && *launch.noop != 0.0F;
  if (launch.counts_steps && !is_noop) {
    for (int64_t param = threadIdx.x; param < launch.param_count; param += kBlockThreads) {
      if (launch.used == nullptr || launch.used[param] != 0) {
        ++launch.steps[param];
      }
    }
  }
  __syncthreads();
  for (int64_t r = threadIdx.x; r < launch.row_count; r += kBlockThreads) {
    const uint32_t param = launch.rows[r].place;
    const int32_t index = launch.rows[r].group - launch.first_group;
    if (index < 0 || index >= launch.group_count) {
      continue;
    }
    AdamCudaScalars& to = launch.scalars[r];
    const bool is_active = !is_noop && (launch.used == nullptr || launch.used[param] != 0);
    to.step = launch.steps[param];
    to.is_active = is_active ? 1 : 0;
    if (is_active) {
      AdamGroup group = launch.groups[index];
      if (launch.lr[index] != nullptr) {
        group.lr = *launch.lr[index];
      }
      const double factor = launch.factors == nullptr ? launch.average : launch.factors[param] * launch.average;
      to.scalars = adam_scalars(group, to.step, factor, launch.decoupled, launch.maximize);
    }
  }
}

}  // namespace

int launch_adam_scalars(const AdamScalarsLaunch& launch, void* stream) {
  if (launch.group_count < 0 || launch.group_count > AdamScalarsLaunch::kMaxGroups || launch.row_count < 0 ||
      launch.param_count < 0) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(&adam_scalars_kernel, 1, stream, launch);
}

}  // namespace bucketwheel
