// Sums of squares of tensors, and of gradient shards while they are written: steps 1 to 3 of [Note: order of a sum of
// squares] in norm.h, bitwise equal to the CPU. Step 4 and what follows is in norm_fold_cuda.cu.
//
// A block takes a chunk at a time. Thread t owns the lanes 4t ... 4t + 3, so it reads four neighbours of every
// kNormLanes elements, and the threads of a warp read one piece of memory. kRows reads are under way at once.
#include "kernels/norm_cuda.h"

#include <type_traits>

#include "kernels/lanes_cuda.h"
#include "kernels/launch_cuda.h"
#include "kernels/norm.h"

namespace bucketwheel {
namespace {

constexpr int kFour = 4;
constexpr int kRowNumel = static_cast<int>(kNormLanes);
constexpr int kWarps = kBlockThreads / 32;
static_assert(kNormLanes == kFour * kBlockThreads, "a thread owns four lanes");

// Step 2 for one value. A float's square is exact in double, so the sum is rounded once, fused or not. A double's
// square is rounded first, as on the CPU.
__device__ __forceinline__ void add_square(double& lane, float value) {
  const double x = value;
  lane = __builtin_fma(x, x, lane);
}
__device__ __forceinline__ void add_square(double& lane, double value) { lane += value * value; }

// Step 3. Thread 0 returns the result. All threads of the block must call this, and may not reuse `sums` before the
// next barrier.
__device__ __forceinline__ double fold_block(const double (&lanes)[kFour], double* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, half);  // addition commutes: lane 0 has the halves added
  }
  if (thread % 32 == 0) {
    sums[thread / 32] = sum;
  }
  __syncthreads();
  double total = 0.0;
  if (thread == 0) {
    for (int warp = 0; warp < kWarps; ++warp) {
      total += sums[warp];
    }
  }
  return total;
}

struct Chunk {
  int64_t begin;  // element of the row
  int64_t numel;
};
__device__ __forceinline__ Chunk chunk_of_row(const NormCudaRow& row, int64_t index) {
  const int64_t begin = index * kNormChunkNumel;
  const int64_t rest = row.numel - begin;
  return {begin, rest < kNormChunkNumel ? rest : kNormChunkNumel};
}

// Calls take for the elements of a chunk that the thread owns, in ascending order: take(rows, i) for the four from
// element i on and those of the rows - 1 next rows of lanes, first kRows at a time and then one by one; take_one(i,
// lane) for the rest.
template <int kRows, class Take, class TakeOne>
__device__ __forceinline__ void for_my_elements(int numel, const Take& take, const TakeOne& take_one) {
  int i = kFour * static_cast<int>(threadIdx.x);
  for (; i + (kRows - 1) * kRowNumel + kFour <= numel; i += kRows * kRowNumel) {
    take(std::integral_constant<int, kRows>(), i);
  }
  for (; i + kFour <= numel; i += kRowNumel) {
    take(std::integral_constant<int, 1>(), i);
  }
  for (int lane = 0; i + lane < numel && lane < kFour; ++lane) {
    take_one(i + lane, lane);
  }
}

// The same where memory may not be aligned for vectors: then every element goes by take_one.
template <int kRows, class Take, class TakeOne>
__device__ __forceinline__ void for_my_elements(bool is_aligned, int numel, const Take& take, const TakeOne& take_one) {
  const auto take_unaligned = [&](auto /*one*/, int i) {
#pragma unroll  // else the lanes go through memory
    for (int lane = 0; lane < kFour; ++lane) {
      take_one(i + lane, lane);
    }
  };
  is_aligned ? for_my_elements<kRows>(numel, take, take_one) : for_my_elements<1>(numel, take_unaligned, take_one);
}

// ---- sums of squares

template <DType kType>
__device__ __forceinline__ void sum_chunk(const char* data, int numel, double (&lanes)[kFour]) {
  constexpr int kRows = 8;
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % (kSizeOf<kType> * kFour) == 0;
  const auto take_one = [&](int i, int lane) { add_square(lanes[lane], load_element<kType>(data, i)); };
  const auto take = [&](auto rows, int i) {
    constexpr int kTaken = decltype(rows)::value;
    Lanes<kType, kFour> x[kTaken];
#pragma unroll
    for (int row = 0; row < kTaken; ++row) {
      x[row].load_to_stay(data + int64_t{i + row * kRowNumel} * kSizeOf<kType>);
    }
#pragma unroll
    for (int row = 0; row < kTaken; ++row) {
#pragma unroll
      for (int lane = 0; lane < kFour; ++lane) {
        add_square(lanes[lane], x[row].get(lane));
      }
    }
  };
  for_my_elements<kRows>(is_aligned, numel, take, take_one);
}

__global__ void __launch_bounds__(kBlockThreads, 4) sumsq_kernel(const __grid_constant__ SumsqLaunch launch) {
  BW_SHARED(double, sums, kWarps);
  int64_t r = 0;
  for (int64_t index = blockIdx.x; index < launch.chunks; index += gridDim.x) {
    r = row_of_chunk(launch.first_chunk, r, launch.row_count, index);
    const NormCudaRow& row = launch.rows[r];
    const Chunk chunk = chunk_of_row(row, index - launch.first_chunk[r]);
    double lanes[kFour] = {};
    with_float_dtype(row.dtype, [&]<DType kType>() {
      sum_chunk<kType>(static_cast<const char*>(row.data) + chunk.begin * kSizeOf<kType>, static_cast<int>(chunk.numel),
                       lanes);
    });
    const double total = fold_block(lanes, sums);
    if (threadIdx.x == 0) {
      launch.partial[index] = total;
    }
    __syncthreads();  // `sums` is read; the next chunk writes it
  }
}

// ---- accumulate

// The elements [first, first + kFour * kRows ...) of the shard in rows of kNormLanes: sums over ranks, in rank order.
template <DType kType, int kRows>
__device__ __forceinline__ void sum_ranks(const AccumulateLaunch& launch, int64_t first,
                                          RealOf<kType> (&sum)[kRows][kFour]) {
#pragma unroll 1  // else the reads of several ranks take all registers
  for (int rank = 0; rank < launch.world; ++rank) {
    const char* from = static_cast<const char*>(launch.sources[rank]) + first * kSizeOf<kType>;
    Lanes<kType, kFour> x[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      x[row].load(from + row * kRowNumel * kSizeOf<kType>);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        sum[row][j] = rank == 0 ? x[row].get(j) : sum[row][j] + x[row].get(j);
      }
    }
  }
}

// Elements [first, first + numel) of the shard, within one chunk. What is stored stays in the cache for Adam: plain
// accesses.
template <DType kShard, DType kType>
__device__ __forceinline__ void accumulate_chunk(const AccumulateLaunch& launch, int64_t first, int numel,
                                                 bool is_aligned, double (&lanes)[kFour]) {
  constexpr int kRows = kType == DType::kFloat64 ? 1 : 2;  // two rows of doubles do not fit into the registers
  using Real = RealOf<kType>;
  const auto take_one = [&](int i, int lane) {
    Real sum = load_element<kType>(launch.sources[0], first + i);
    for (int rank = 1; rank < launch.world; ++rank) {
      sum += load_element<kType>(launch.sources[rank], first + i);
    }
    store_element<kShard>(launch.shard, first + i,
                          launch.add ? load_element<kShard>(launch.shard, first + i) + sum : sum);
    add_square(lanes[lane], load_element<kShard>(launch.shard, first + i));
  };
  const auto take = [&](auto rows, int i) {
    constexpr int kTaken = decltype(rows)::value;
    Real sum[kTaken][kFour];
    sum_ranks<kType, kTaken>(launch, first + i, sum);
#pragma unroll
    for (int row = 0; row < kTaken; ++row) {
      char* to = static_cast<char*>(launch.shard) + (first + i + row * kRowNumel) * kSizeOf<kShard>;
      Lanes<kShard, kFour> stored;
      if (launch.add) {
        stored.load_to_stay(to);
#pragma unroll
        for (int lane = 0; lane < kFour; ++lane) {
          sum[row][lane] = stored.get(lane) + sum[row][lane];
        }
      }
#pragma unroll
      for (int lane = 0; lane < kFour; ++lane) {
        stored.set(lane, sum[row][lane]);
      }
      stored.store_to_stay(to);
#pragma unroll
      for (int lane = 0; lane < kFour; ++lane) {
        add_square(lanes[lane], stored.get(lane));
      }
    }
  };
  for_my_elements<kRows>(is_aligned, numel, take, take_one);
}

// Whether four elements from `first` on, and every fourth one, are aligned for vectors in the shard and all sources.
template <DType kShard, DType kType>
__device__ __forceinline__ bool is_aligned_at(const AccumulateLaunch& launch, int64_t first) {
  const auto at = static_cast<uintptr_t>(first);
  uintptr_t bits = (reinterpret_cast<uintptr_t>(launch.shard) + at * kSizeOf<kShard>) % (kSizeOf<kShard> * kFour);
  for (int rank = 0; rank < launch.world; ++rank) {
    bits |= (reinterpret_cast<uintptr_t>(launch.sources[rank]) + at * kSizeOf<kType>) % (kSizeOf<kType> * kFour);
  }
  return bits == 0;
}

template <DType kShard, DType kType>
__global__ void __launch_bounds__(kBlockThreads, 4) accumulate_kernel(const __grid_constant__ AccumulateLaunch launch) {
  BW_SHARED(double, block_sums, kWarps);
  const SumsqLaunch& sums = launch.sums;
  int64_t r = 0;
  for (int64_t index = blockIdx.x; index < sums.chunks; index += gridDim.x) {
    r = row_of_chunk(sums.first_chunk, r, sums.row_count, index);
    const NormCudaRow& row = sums.rows[r];
    const Chunk chunk = chunk_of_row(row, index - sums.first_chunk[r]);
    const int64_t first = row.begin + chunk.begin;
    double lanes[kFour] = {};
    accumulate_chunk<kShard, kType>(launch, first, static_cast<int>(chunk.numel),
                                    is_aligned_at<kShard, kType>(launch, first), lanes);
    if (row.is_summed == 0) {
      continue;  // all threads of the block
    }
    const double total = fold_block(lanes, block_sums);
    if (threadIdx.x == 0) {
      sums.partial[index] = total;
    }
    __syncthreads();  // `block_sums` is read; the next chunk writes it
  }
}

using AccumulateKernel = void (*)(AccumulateLaunch);

// Null for dtypes that do not go together.
template <DType kShard>
AccumulateKernel accumulate_kernel_of(DType dtype) {
  return dtype == DType::kFloat32    ? &accumulate_kernel<kShard, DType::kFloat32>
         : dtype == DType::kBFloat16 ? &accumulate_kernel<kShard, DType::kBFloat16>
         : dtype == DType::kFloat16  ? &accumulate_kernel<kShard, DType::kFloat16>
                                     : nullptr;
}
AccumulateKernel accumulate_kernel_of(DType shard, DType dtype) {
  if (shard == DType::kFloat64 && dtype == DType::kFloat64) {
    return &accumulate_kernel<DType::kFloat64, DType::kFloat64>;
  }
  return shard == DType::kFloat32    ? accumulate_kernel_of<DType::kFloat32>(dtype)
         : shard == DType::kBFloat16 ? accumulate_kernel_of<DType::kBFloat16>(dtype)
                                     : nullptr;
}

}  // namespace

int launch_sumsq(const SumsqLaunch& launch, void* stream) {
  return launch_kernel(&sumsq_kernel, blocks_for(launch.chunks, launch.max_blocks), stream, launch);
}

int launch_accumulate(const AccumulateLaunch& launch, void* stream) {
  const AccumulateKernel kernel = accumulate_kernel_of(launch.shard_dtype, launch.dtype);
  if (kernel == nullptr || launch.world < 1 || launch.world > AccumulateLaunch::kMaxWorld) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(kernel, blocks_for(launch.sums.chunks, launch.sums.max_blocks), stream, launch);
}

}  // namespace bucketwheel
