// Copies, casts, additions, zeros and sums over ranks on CUDA, bitwise equal to the CPU (NaN payloads excepted).
//
// A block takes a chunk at a time, and its threads kLanes elements: 16 bytes of the wider side, so that the threads of
// a warp read and write whole lines. Elements go one by one before and after the aligned part, and where the two sides
// are not aligned together.
#include "kernels/pack_cuda.h"

#include "kernels/lanes_cuda.h"
#include "kernels/launch_cuda.h"

namespace bucketwheel {
namespace {

// Aligned accesses of kLanes elements begin `head` elements after `address`, if `head` is below kLanes; elements of
// kBytes.
template <int kBytes, int kLanes>
BW_HD bool is_aligned_after(const void* address, int head) {
  constexpr uintptr_t kAlignment = kBytes * kLanes < 16 ? kBytes * kLanes : 16;
  return (reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(head * kBytes)) % kAlignment == 0;
}

// Calls lanes(i) for every kLanes elements from i on, and single(i) for the others: those before `head`, and the last
// few.
template <int kLanes, class TakeLanes, class TakeOne>
__device__ __forceinline__ void for_elements(int numel, int head, const TakeLanes& take_lanes,
                                             const TakeOne& take_one) {
  const int body = head < kLanes && head < numel ? head : numel;  // not aligned anywhere: no body
  const int steps = (numel - body) / kLanes;
  const int tail = body + steps * kLanes;
  for (int step = static_cast<int>(threadIdx.x); step < steps; step += kBlockThreads) {
    take_lanes(body + step * kLanes);
  }
  for (int k = static_cast<int>(threadIdx.x); k < body + (numel - tail); k += kBlockThreads) {
    take_one(k < body ? k : tail + (k - body));
  }
}

// ---- copies

// Sizes are those of copies between equal dtypes, whatever they mean.
template <class T>
__device__ __forceinline__ void copy_chunk(char* to, const char* from, int numel) {
  constexpr int kBytes = sizeof(T);
  constexpr int kLanes = 16 / kBytes;
  int head = 0;
  while (head < kLanes &&
         !(is_aligned_after<kBytes, kLanes>(to, head) && is_aligned_after<kBytes, kLanes>(from, head))) {
    ++head;
  }
  for_elements<kLanes>(
      numel, head, [&](int i) { store_vector<true>(to + i * kBytes, load_vector<false, uint4>(from + i * kBytes)); },
      [&](int i) { reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i]; });
}

__device__ __forceinline__ void zero_chunk(char* to, int bytes) {
  const int head = static_cast<int>(-reinterpret_cast<uintptr_t>(to) % 16);
  for_elements<16>(
      bytes, head, [&](int i) { store_vector<true>(to + i, uint4{0, 0, 0, 0}); }, [&](int i) { to[i] = 0; });
}

// What pack.h says: a cast goes through float32, a sum is one of float64 where either side is.
template <DType kTo, DType kFrom, bool kAdd>
__device__ __forceinline__ RealOf<kTo> taken(RealOf<kTo> before, RealOf<kFrom> value) {
  if constexpr (kAdd) {
    return static_cast<RealOf<kTo>>(before + value);
  } else {
    return static_cast<float>(value);
  }
}

template <DType kTo, DType kFrom, bool kAdd>
__device__ __forceinline__ void take_chunk(char* to, const char* from, int numel) {
  constexpr int kWide = kSizeOf<kTo> < kSizeOf<kFrom> ? kSizeOf<kFrom> : kSizeOf<kTo>;
  constexpr int kLanes = 16 / kWide;
  int head = 0;
  while (head < kLanes &&
         !(is_aligned_after<kSizeOf<kTo>, kLanes>(to, head) && is_aligned_after<kSizeOf<kFrom>, kLanes>(from, head))) {
    ++head;
  }
  for_elements<kLanes>(
      numel, head,
      [&](int i) {
        Lanes<kFrom, kLanes> x;
        Lanes<kTo, kLanes> y = {};
        x.load(from + i * kSizeOf<kFrom>);
        if constexpr (kAdd) {
          y.load_to_stay(to + i * kSizeOf<kTo>);
        }
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          y.set(lane, taken<kTo, kFrom, kAdd>(y.get(lane), x.get(lane)));
        }
        y.store_to_stay(to + i * kSizeOf<kTo>);
      },
      [&](int i) {
        const RealOf<kTo> before = kAdd ? load_element<kTo>(to, i) : 0;
        store_element<kTo>(to, i, taken<kTo, kFrom, kAdd>(before, load_element<kFrom>(from, i)));
      });
}

__global__ void __launch_bounds__(kBlockThreads, 4) copy_kernel(const __grid_constant__ CopyLaunch launch) {
  int64_t index = 0;
  for (int64_t chunk = blockIdx.x; chunk < launch.chunks; chunk += gridDim.x) {
    index = row_of_chunk(launch.first_chunk, index, launch.item_count, chunk);
    const CopyItem& item = launch.items[index];
    const int64_t begin = (chunk - launch.first_chunk[index]) * kCopyCudaChunkNumel;
    const int64_t rest = item.numel - begin;
    const int numel = static_cast<int>(rest < kCopyCudaChunkNumel ? rest : kCopyCudaChunkNumel);
    char* to = static_cast<char*>(item.to) + begin * static_cast<int64_t>(size_of(item.to_dtype));
    if (item.from == nullptr) {
      zero_chunk(to, item.add ? 0 : numel * static_cast<int>(size_of(item.to_dtype)));
      continue;
    }
    const char* from = static_cast<const char*>(item.from) + begin * static_cast<int64_t>(size_of(item.from_dtype));
    const DType from_dtype = item.from_dtype;
    if (!item.add && item.to_dtype == from_dtype) {
      switch (static_cast<int64_t>(size_of(from_dtype))) {
        case 8:
          copy_chunk<uint64_t>(to, from, numel);
          break;
        case 4:
          copy_chunk<uint32_t>(to, from, numel);
          break;
        case 2:
          copy_chunk<uint16_t>(to, from, numel);
          break;
        default:
          copy_chunk<uint8_t>(to, from, numel);
          break;
      }
      continue;
    }
    with_float_dtype(item.to_dtype, [&]<DType kTo>() {
      with_float_dtype(from_dtype, [&]<DType kFrom>() {
        if (item.add) {
          take_chunk<kTo, kFrom, true>(to, from, numel);
        } else if constexpr (kTo != kFrom) {
          take_chunk<kTo, kFrom, false>(to, from, numel);
        }
      });
    });
  }
}

// ---- sums over ranks

// Elements that are 16 bytes of the dtype; `head` of them are before the first aligned ones, kLanes: never.
template <DType kType>
struct Reduce {
  static constexpr int kLanes = 16 / kSizeOf<kType>;
  ReduceLaunch launch;
  int head;
};

template <DType kType>
__global__ void __launch_bounds__(kBlockThreads) reduce_kernel(const __grid_constant__ Reduce<kType> reduce) {
  using Real = RealOf<kType>;
  constexpr int kLanes = Reduce<kType>::kLanes;
  const ReduceLaunch& launch = reduce.launch;
  const Real divisor = static_cast<Real>(launch.divisor);
  const Real factor = static_cast<Real>(launch.factor);
  const bool scales = launch.factor != 1.0 || launch.divisor != 1.0;
  for (int64_t chunk = blockIdx.x; chunk * kReduceCudaChunkNumel < launch.numel; chunk += gridDim.x) {
    const int64_t begin = chunk * kReduceCudaChunkNumel;
    const int64_t rest = launch.numel - begin;
    const int64_t offset = begin * kSizeOf<kType>;
    char* to = static_cast<char*>(launch.to) + offset;
    for_elements<kLanes>(
        static_cast<int>(rest < kReduceCudaChunkNumel ? rest : kReduceCudaChunkNumel), reduce.head,
        [&](int i) {
          Real sum[kLanes];
          for (int rank = 0; rank < launch.world; ++rank) {
            Lanes<kType, kLanes> x;
            x.load(static_cast<const char*>(launch.sources[rank]) + offset + i * kSizeOf<kType>);
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
              sum[lane] = rank == 0 ? x.get(lane) : sum[lane] + x.get(lane);
            }
          }
          Lanes<kType, kLanes> y = {};
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            y.set(lane, scales ? sum[lane] * factor / divisor : sum[lane]);
          }
          y.store_to_stay(to + i * kSizeOf<kType>);
        },
        [&](int i) {
          Real sum = load_element<kType>(launch.sources[0], begin + i);
          for (int rank = 1; rank < launch.world; ++rank) {
            sum += load_element<kType>(launch.sources[rank], begin + i);
          }
          store_element<kType>(to, i, scales ? sum * factor / divisor : sum);
        });
  }
}

template <DType kType>
int launch_reduce_of(const ReduceLaunch& launch, void* stream) {
  constexpr int kLanes = Reduce<kType>::kLanes;
  int head = 0;
  for (; head < kLanes; ++head) {
    bool is_aligned = is_aligned_after<kSizeOf<kType>, kLanes>(launch.to, head);
    for (int rank = 0; rank < launch.world; ++rank) {
      is_aligned = is_aligned && is_aligned_after<kSizeOf<kType>, kLanes>(launch.sources[rank], head);
    }
    if (is_aligned) {
      break;
    }
  }
  const int64_t chunks = launch.numel / kReduceCudaChunkNumel + (launch.numel % kReduceCudaChunkNumel != 0 ? 1 : 0);
  return launch_kernel(&reduce_kernel<kType>, blocks_for(chunks, launch.max_blocks), stream,
                       Reduce<kType>{launch, head});
}

}  // namespace

int launch_copy(const CopyLaunch& launch, void* stream) {
  return launch_kernel(&copy_kernel, blocks_for(launch.chunks, launch.max_blocks), stream, launch);
}

int launch_reduce(const ReduceLaunch& launch, void* stream) {
  if (launch.world < 1 || launch.world > ReduceLaunch::kMaxWorld || launch.numel < 0) {
    return cudaErrorInvalidValue;
  }
  switch (launch.dtype) {
    case DType::kFloat32:
      return launch_reduce_of<DType::kFloat32>(launch, stream);
    case DType::kBFloat16:
      return launch_reduce_of<DType::kBFloat16>(launch, stream);
    case DType::kFloat16:
      return launch_reduce_of<DType::kFloat16>(launch, stream);
    case DType::kFloat64:
      return launch_reduce_of<DType::kFloat64>(launch, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace bucketwheel
