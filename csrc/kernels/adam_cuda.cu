// The fused Adam step on CUDA: adam_element() of adam_math.h for every element of a table of rows, in one launch for
// each variant, and the one-block kernel that makes its scalars. Bitwise equal to the CPU (NaN payloads excepted).
//
// A block takes a chunk at a time, and its threads kLanes elements at a time: every array is
// read first, as a vector, and converted when all reads are under way. What lies before the first aligned element of
// a row and after its last whole step goes element by element, and so do rows whose arrays are not aligned together.
#include "kernels/adam_cuda.h"

#include <type_traits>

#include "kernels/lanes_cuda.h"
#include "kernels/launch_cuda.h"
#include "kernels/philox.h"

namespace bucketwheel {
namespace {

// What a kernel is compiled for.
template <DType kPIn, DType kStateIn, AdamWeight kWeightIn, bool kAmsgradIn>
struct Kind {
  static constexpr DType kP = kPIn;
  static constexpr DType kState = kStateIn;
  static constexpr AdamWeight kWeight = kWeightIn;
  static constexpr bool kAmsgrad = kAmsgradIn;
  static constexpr DType kReal = kP == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  using Real = RealOf<kReal>;
  static constexpr DType kMaster = kWeight == AdamWeight::kRemainder ? DType::kInt16 : DType::kFloat32;

  // Elements of a thread's step: 16 bytes of the states, so that the threads of a warp read and write them in whole
  // lines. With float32 parameters beside 16-bit states those come as two vectors: a step is also one block of random
  // bits.
  static constexpr int kLanes = 16 / kSizeOf<kState>;
  // Blocks that run on a multiprocessor together: 4 leave a thread 64 registers, 3 leave 80, 2 leave 128.
  static constexpr int kBlocks = kReal == DType::kFloat64 ? 2 : kState == DType::kFloat32 ? 4 : 3;

  // A copy stays in registers: else the row is read again after each store, which might have changed it. With amsgrad
  // there are none left.
  using Row = std::conditional_t<kAmsgrad, const AdamCudaRow&, const AdamCudaRow>;

  static constexpr bool kRoundsV = kState == DType::kBFloat16;
};
static_assert(kRandomBlockNumel == 8, "a step of 8, 4 or 2 elements lies within one block of random bits");

// What the elements of a chunk share.
template <class K>
struct Common {
  AdamScalarsOf<typename K::Real> scalars;
  bool decoupled;
  bool rounds_v;  // stochastically
  bool resync;
  uint64_t seed;
  uint32_t param;
  int64_t step;

  __device__ __forceinline__ RandomBlock random(int64_t element) const {
    return random_block(seed, param, element / kRandomBlockNumel, step);
  }
};

// RandomBlock::bits16() without an index into registers, which would send them through memory.
__device__ __forceinline__ uint32_t bits16(const RandomBlock& random, int64_t element) {
  const uint32_t lane = static_cast<uint32_t>(element) & 7u;
  const uint32_t low = lane < 2 ? random.word[0] : random.word[1];
  const uint32_t high = lane < 6 ? random.word[2] : random.word[3];
  return ((lane < 4 ? low : high) >> (lane % 2 * 16)) & 0xffffu;
}

__device__ __forceinline__ uint16_t to_bf16(float value, bool stochastic, const RandomBlock& random, int64_t element) {
  return stochastic ? round_to_bf16_stochastic(value, bits16(random, element)) : round_to_bf16(value);
}

// The master of a parameter with these bits, after what others have written to that.
template <DType kP>
__device__ __forceinline__ float followed(float master, uint16_t param) {
  return kP == DType::kBFloat16 ? followed_bf16(master, param) : followed_fp16(master, param);
}

// ---- element by element

template <class K>
__device__ __forceinline__ typename K::Real load_gradient(const AdamCudaRow& row, int64_t i) {
  if constexpr (K::kReal == DType::kFloat64) {
    return load_element<DType::kFloat64>(row.g, i);
  } else {
    return row.g_dtype == DType::kFloat32    ? load_element<DType::kFloat32>(row.g, i)
           : row.g_dtype == DType::kBFloat16 ? load_element<DType::kBFloat16>(row.g, i)
                                             : load_element<DType::kFloat16>(row.g, i);
  }
}

template <class K>
__device__ __forceinline__ typename K::Real load_weight(const AdamCudaRow& row, int64_t i, bool resync) {
  if constexpr (K::kWeight == AdamWeight::kParam) {
    return load_element<K::kP>(row.p, i);
  } else if constexpr (K::kWeight == AdamWeight::kMaster) {
    const float master = load_element<DType::kFloat32>(row.master, i);
    return resync ? followed<K::kP>(master, static_cast<const uint16_t*>(row.p)[i]) : master;
  } else {
    return join_master({static_cast<const uint16_t*>(row.p)[i], static_cast<const uint16_t*>(row.master)[i]});
  }
}

template <class K>
__device__ __forceinline__ void store_weight(const AdamCudaRow& row, int64_t i, typename K::Real weight) {
  if constexpr (K::kWeight == AdamWeight::kRemainder) {
    const SplitMaster split = split_master(weight);
    static_cast<uint16_t*>(row.p)[i] = split.high;
    static_cast<uint16_t*>(row.master)[i] = split.low;
    return;
  }
  if constexpr (K::kWeight == AdamWeight::kMaster) {
    store_element<DType::kFloat32>(row.master, i, weight);
  }
  store_element<K::kP>(row.p, i, weight);
}

template <class K>
__device__ __forceinline__ void step_element(const AdamCudaRow& row, int64_t i, const Common<K>& common) {
  using Real = typename K::Real;
  Real g = load_gradient<K>(row, i);
  Real weight = load_weight<K>(row, i, common.resync);
  Real m = load_element<K::kState>(row.m, i);
  Real v = load_element<K::kState>(row.v, i);
  Real vmax = 0;
  if constexpr (K::kAmsgrad) {
    vmax = load_element<K::kState>(row.vmax, i);
  }
  adam_element<Real>(weight, g, m, v, K::kAmsgrad ? &vmax : nullptr, common.scalars, common.decoupled);
  store_weight<K>(row, i, weight);
  store_element<K::kState>(row.m, i, m);
  if constexpr (K::kAmsgrad) {
    store_element<K::kState>(row.vmax, i, vmax);
  }
  if constexpr (K::kRoundsV) {
    if (common.rounds_v) {
      const int64_t element = row.param_begin + i;
      const RandomBlock random = common.random(element);
      static_cast<uint16_t*>(row.v)[i] = to_bf16(v, true, random, element);
      return;
    }
  }
  store_element<K::kState>(row.v, i, v);
}

// ---- kLanes elements at a time

// Gradients of any dtype that K takes. The dtype is the same for all threads of a block: its branches cost no
// divergence.
template <class K>
struct Gradients {
  Lanes<K::kReal, K::kLanes> lanes;

  __device__ __forceinline__ void load(const void* g, DType dtype, int64_t i) {
    if (dtype == K::kReal) {
      lanes.load(static_cast<const typename K::Real*>(g) + i);
    } else if constexpr (K::kReal == DType::kFloat32) {
      load_words<false, K::kLanes / 2>(lanes.word, static_cast<const uint16_t*>(g) + i);
    }
  }
  // In place: element i comes from word i / 2, so from the last one down none is overwritten before it is read.
  __device__ __forceinline__ void widen(DType dtype) {
    if constexpr (K::kReal == DType::kFloat32) {
      if (dtype == DType::kBFloat16) {
#pragma unroll
        for (int i = K::kLanes - 1; i >= 0; --i) {
          lanes.set(i, widen_bf16(lanes.bits16(i)));
        }
      } else if (dtype == DType::kFloat16) {
#pragma unroll
        for (int i = K::kLanes - 1; i >= 0; --i) {
          lanes.set(i, widen_fp16(lanes.bits16(i)));
        }
      }
    }
  }
};

// kLanes elements of all arrays of a row. Arrays that K has no use for take no registers.
template <class K>
struct Step {
  using Real = typename K::Real;
  template <DType kType>
  using Array = Lanes<kType, K::kLanes>;

  Gradients<K> g;
  Array<K::kP> p;
  Array<K::kMaster> master;
  Array<K::kState> m;
  Array<K::kState> v;
  Array<K::kState> vmax;

  template <DType kType>
  __device__ __forceinline__ static char* place(const void* array, int64_t i) {
    return static_cast<char*>(const_cast<void*>(array)) + i * kSizeOf<kType>;
  }

  __device__ __forceinline__ void load(const AdamCudaRow& row, int64_t i, bool resync) {
    g.load(row.g, row.g_dtype, i);
    if (K::kWeight != AdamWeight::kMaster || resync) {
      p.load(place<K::kP>(row.p, i));
    } else {
      p = {};  // it is written only
    }
    if constexpr (K::kWeight != AdamWeight::kParam) {
      master.load(place<K::kMaster>(row.master, i));
    }
    m.load(place<K::kState>(row.m, i));
    v.load(place<K::kState>(row.v, i));
    if constexpr (K::kAmsgrad) {
      vmax.load(place<K::kState>(row.vmax, i));
    }
    g.widen(row.g_dtype);
  }

  __device__ __forceinline__ void store(const AdamCudaRow& row, int64_t i) const {
    p.store_to_stay(place<K::kP>(row.p, i));
    if constexpr (K::kWeight != AdamWeight::kParam) {
      master.store(place<K::kMaster>(row.master, i));
    }
    m.store(place<K::kState>(row.m, i));
    v.store(place<K::kState>(row.v, i));
    if constexpr (K::kAmsgrad) {
      vmax.store(place<K::kState>(row.vmax, i));
    }
  }

  __device__ __forceinline__ Real weight(int i, bool resync) const {
    if constexpr (K::kWeight == AdamWeight::kParam) {
      return p.get(i);
    } else if constexpr (K::kWeight == AdamWeight::kMaster) {
      return resync ? followed<K::kP>(master.get(i), p.bits16(i)) : master.get(i);
    } else {
      return join_master({p.bits16(i), master.bits16(i)});
    }
  }

  __device__ __forceinline__ void set_weight(int i, Real weight) {
    if constexpr (K::kWeight == AdamWeight::kRemainder) {
      const SplitMaster split = split_master(weight);
      p.set_bits16(i, split.high);
      master.set_bits16(i, split.low);
    } else {
      p.set(i, weight);
      if constexpr (K::kWeight == AdamWeight::kMaster) {
        master.set(i, weight);
      }
    }
  }

  // `element`: the first one's place in its parameter, a multiple of kLanes.
  __device__ __forceinline__ void run(const Common<K>& common, int64_t element) {
    RandomBlock random_v{};
    if constexpr (K::kRoundsV) {
      if (common.rounds_v) {
        random_v = common.random(element);
      }
    }
    const int64_t lane = element % kRandomBlockNumel;
#pragma unroll
    for (int i = 0; i < K::kLanes; ++i) {
      Real w = weight(i, common.resync);
      Real mi = m.get(i);
      Real vi = v.get(i);
      Real xi = 0;
      if constexpr (K::kAmsgrad) {
        xi = vmax.get(i);
      }
      adam_element<Real>(w, g.lanes.get(i), mi, vi, K::kAmsgrad ? &xi : nullptr, common.scalars, common.decoupled);
      const int64_t place = K::kLanes == kRandomBlockNumel ? i : lane + i;
      set_weight(i, w);
      m.set(i, mi);
      if constexpr (K::kRoundsV) {
        v.set_bits16(i, to_bf16(vi, common.rounds_v, random_v, place));
      } else {
        v.set(i, vi);
      }
      if constexpr (K::kAmsgrad) {
        vmax.set(i, xi);
      }
    }
  }
};

// ---- the kernel

// Chunk `chunk` of a row: the first one also has the row's head, so that all others start aligned.
template <class K>
__device__ __forceinline__ void step_chunk(const AdamCudaRow& row, int64_t chunk, const Common<K>& common) {
  const bool is_aligned = row.head != AdamCudaRow::kUnaligned;
  const int64_t head = is_aligned ? row.head : 0;
  const int64_t aligned = chunk * kAdamCudaChunkNumel + head;
  const int64_t next = aligned + kAdamCudaChunkNumel;
  const int64_t begin = chunk == 0 ? 0 : aligned;
  const int64_t end = next < row.numel ? next : row.numel;
  const int64_t body = is_aligned && aligned < end ? aligned : end;  // unaligned: no body
  const int steps = static_cast<int>((end - body) / K::kLanes);
  const int64_t tail = body + steps * K::kLanes;

  for (int step = static_cast<int>(threadIdx.x); step < steps; step += kBlockThreads) {
    const int64_t i = body + step * K::kLanes;
    Step<K> lanes;
    lanes.load(row, i, common.resync);
    lanes.run(common, row.param_begin + i);
    lanes.store(row, i);
  }
  const int64_t before = body - begin;
  const int64_t singles = before + (end - tail);  // negative where the chunk lies beyond the row's end
  for (int64_t k = threadIdx.x; k < singles; k += kBlockThreads) {
    step_element<K>(row, k < before ? begin + k : tail + (k - before), common);
  }
}

template <class K>
__global__ void __launch_bounds__(kBlockThreads, K::kBlocks) adam_kernel(const __grid_constant__ AdamLaunch launch) {
  const int64_t first = launch.first_chunk[launch.first_row];
  int64_t row = launch.first_row;
  for (int64_t chunk = first + blockIdx.x; chunk < first + launch.chunks; chunk += gridDim.x) {
    row = row_of_chunk(launch.first_chunk, row, launch.last_row, chunk);
    const AdamCudaScalars& of_row = launch.scalars[row];
    if (of_row.is_active == 0) {
      continue;
    }
    typename K::Row at = launch.rows[row];
    const Common<K> common = {of_row.scalars.rounded<typename K::Real>(),
                              launch.decoupled,
                              launch.stochastic,
                              launch.resync,
                              launch.seed,
                              at.param,
                              of_row.step};
    step_chunk<K>(at, chunk - launch.first_chunk[row], common);
  }
}

// ---- which kernel

using AdamKernel = void (*)(AdamLaunch);

template <DType kP, DType kState, AdamWeight kWeight>
AdamKernel with_amsgrad(bool amsgrad) {
  return amsgrad ? &adam_kernel<Kind<kP, kState, kWeight, true>> : &adam_kernel<Kind<kP, kState, kWeight, false>>;
}

template <DType kP, AdamWeight kWeight>
AdamKernel with_state(const AdamVariant& variant) {
  return variant.state_dtype == DType::kFloat32    ? with_amsgrad<kP, DType::kFloat32, kWeight>(variant.amsgrad)
         : variant.state_dtype == DType::kBFloat16 ? with_amsgrad<kP, DType::kBFloat16, kWeight>(variant.amsgrad)
                                                   : nullptr;
}

// Null for a variant that there is not.
AdamKernel kernel_for(const AdamVariant& variant) {
  constexpr AdamWeight kParam = AdamWeight::kParam, kMaster = AdamWeight::kMaster, kRest = AdamWeight::kRemainder;
  const bool is_param = variant.weight == kParam, is_master = variant.weight == kMaster;
  if (variant.p_dtype == DType::kFloat32 && is_param) {
    return with_state<DType::kFloat32, kParam>(variant);
  }
  if (variant.p_dtype == DType::kBFloat16) {
    return is_param    ? with_state<DType::kBFloat16, kParam>(variant)
           : is_master ? with_state<DType::kBFloat16, kMaster>(variant)
                       : with_state<DType::kBFloat16, kRest>(variant);
  }
  if (variant.p_dtype == DType::kFloat16 && (is_param || is_master)) {
    return is_param ? with_state<DType::kFloat16, kParam>(variant) : with_state<DType::kFloat16, kMaster>(variant);
  }
  if (variant.p_dtype == DType::kFloat64 && variant.state_dtype == DType::kFloat64 && is_param) {
    return with_amsgrad<DType::kFloat64, DType::kFloat64, kParam>(variant.amsgrad);
  }
  return nullptr;
}

}  // namespace

int launch_adam(const AdamLaunch& launch, void* stream) {
  const AdamKernel kernel = kernel_for(launch.variant);
  if (kernel == nullptr || launch.first_row < 0 || launch.last_row < launch.first_row) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(kernel, blocks_for(launch.chunks, launch.max_blocks), stream, launch);
}

}  // namespace bucketwheel
