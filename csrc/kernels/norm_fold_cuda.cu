// On CUDA, from the sums of squares of chunks: sums of rows, of parameters and over ranks, the norm, and the clipped
// factors. The order of additions is that of fold() in norm_fold.h: each thread adds up a group, thread 0 the groups.
#include "kernels/adam_math.h"
#include "kernels/launch_cuda.h"
#include "kernels/norm_cuda.h"
#include "kernels/norm_fold.h"

namespace bucketwheel {
namespace {

constexpr int64_t kMaxBlocks = 1024;  // more rows, or parameters, share blocks

// fold() of value(0), ..., value(count - 1), each called once. Thread 0 returns the result. All threads of the block
// must call this. `sums` has room for kBlockThreads groups and may be reused afterwards.
template <class Value>
__device__ __forceinline__ double fold_by_block(int64_t count, const Value& value, double* sums) {
  const int64_t groups = fold_groups(count);
  const int thread = static_cast<int>(threadIdx.x);
  double total = 0.0;
  for (int64_t first = 0; first < groups; first += kBlockThreads) {
    const int64_t begin = (first + thread) * kFoldGroup;
    const int64_t end = count - begin < kFoldGroup ? count : begin + kFoldGroup;
    double sum = 0.0;
    for (int64_t i = begin; i < end; ++i) {
      sum += value(i);
    }
    sums[thread] = sum;
    __syncthreads();
    const int held = static_cast<int>(groups - first < kBlockThreads ? groups - first : kBlockThreads);
    for (int group = 0; thread == 0 && group < held; ++group) {
      total += sums[group];
    }
    __syncthreads();
  }
  return total;
}

__global__ void __launch_bounds__(kBlockThreads) fold_kernel(const __grid_constant__ FoldLaunch launch) {
  BW_SHARED(double, sums, kBlockThreads);
  for (int64_t r = blockIdx.x; r < launch.row_count; r += gridDim.x) {
    if (launch.rows[r].is_summed == 0) {
      continue;  // all threads of the block
    }
    const int64_t first = launch.first_chunk[r];
    const double* partial = launch.partial + first;
    const double sum =
        fold_by_block(launch.first_chunk[r + 1] - first, [partial](int64_t i) { return partial[i]; }, sums);
    if (threadIdx.x == 0) {
      launch.sums[r] = sum;
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads) param_sums_kernel(const __grid_constant__ ParamSumsLaunch launch) {
  const int64_t stride = int64_t{gridDim.x} * kBlockThreads;
  for (int64_t param = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; param < launch.param_count; param += stride) {
    double sum = 0.0;
    if (launch.held == nullptr || launch.held[param] != 0) {
      for (int64_t i = launch.first_row_of[param]; i < launch.first_row_of[param + 1]; ++i) {
        sum += launch.sums[launch.rows_of[i]];
      }
    }
    launch.param_sums[param] = sum;
  }
}

// A thread for each parameter: neighbours read neighbours of each rank's row.
__global__ void __launch_bounds__(kBlockThreads) rank_sums_kernel(const __grid_constant__ RankSumsLaunch launch) {
  const int64_t count = launch.param_count;
  const int64_t stride = int64_t{gridDim.x} * kBlockThreads;
  for (int64_t param = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; param < count; param += stride) {
    double sum = launch.by_rank[param];
    for (int rank = 1; rank < launch.world; ++rank) {
      sum += launch.by_rank[rank * count + param];
    }
    launch.sums[param] = sum;
  }
}

// Writes the norm, and returns the clip coefficient; in Real.
template <class Real>
__device__ __forceinline__ double coefficient_of(const ClipLaunch& launch, double square) {
  const auto norm = static_cast<Real>(square_root(square) * launch.average);
  const Real coefficient = Real{1} / (norm + static_cast<Real>(1e-6)) * static_cast<Real>(launch.max_norm);
  *static_cast<Real*>(launch.norm) = norm;
  return coefficient > Real{1} ? Real{1} : coefficient;
}

// One block: the coefficient needs all sums, and the factors need the coefficient.
__global__ void __launch_bounds__(kBlockThreads) clip_kernel(const __grid_constant__ ClipLaunch launch) {
  BW_SHARED(double, sums, kBlockThreads);
  BW_SHARED(double, shared_coefficient, 1);
  const int64_t count = launch.param_count;
  const double square = fold_by_block(
      count,
      [&](int64_t param) {
        const double sum = launch.param_sums[param];
        const double factor = launch.factors == nullptr || launch.resets ? 1.0 : launch.factors[param];
        if (launch.param_norms != nullptr) {
          launch.param_norms[param] = square_root(sum) * __builtin_fabs(factor) * launch.average;
        }
        return launch.chosen == nullptr || launch.chosen[param] != 0 ? sum * (factor * factor) : 0.0;
      },
      sums);
  if (threadIdx.x == 0) {
    *shared_coefficient =
        launch.is_double ? coefficient_of<double>(launch, square) : coefficient_of<float>(launch, square);
  }
  __syncthreads();
  if (launch.clips || launch.resets) {
    const double coefficient = launch.clips ? *shared_coefficient : 1.0;
    for (int64_t param = threadIdx.x; param < count; param += kBlockThreads) {
      const double factor = launch.resets ? 1.0 : launch.factors[param];
      const bool is_chosen = launch.chosen == nullptr || launch.chosen[param] != 0;
      launch.factors[param] = is_chosen ? factor * coefficient : factor;
    }
  }
}

int64_t at_most_max_blocks(int64_t blocks) { return blocks < kMaxBlocks ? blocks : kMaxBlocks; }

// With a thread for each parameter.
int64_t blocks_of_params(int64_t params) { return at_most_max_blocks((params + kBlockThreads - 1) / kBlockThreads); }

}  // namespace

int launch_fold(const FoldLaunch& launch, void* stream) {
  return launch_kernel(&fold_kernel, at_most_max_blocks(launch.row_count), stream, launch);
}

int launch_param_sums(const ParamSumsLaunch& launch, void* stream) {
  return launch_kernel(&param_sums_kernel, blocks_of_params(launch.param_count), stream, launch);
}

int launch_rank_sums(const RankSumsLaunch& launch, void* stream) {
  if (launch.world < 1 || launch.param_count < 0) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(&rank_sums_kernel, blocks_of_params(launch.param_count), stream, launch);
}

int launch_clip(const ClipLaunch& launch, void* stream) {
  if (launch.param_count < 0 || launch.norm == nullptr ||
      ((launch.clips || launch.resets) && launch.factors == nullptr && launch.param_count > 0)) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(&clip_kernel, 1, stream, launch);
}

}  // namespace bucketwheel
