// Elements of an array in the registers of a CUDA thread: how they are read, written and converted.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/float16.h"

namespace bucketwheel {

// Data that a kernel touches once is read and written so that it leaves the cache first: collectives that run at the
// same time need the cache. false: plain accesses, to measure the effect. Data that is read soon (parameters and
// buckets by a collective, gradients by Adam after their norm) stays in the cache.
inline constexpr bool kStreams = true;

template <bool kStays, class V>
__device__ __forceinline__ V load_vector(const void* from) {
  const V* at = static_cast<const V*>(from);
  if constexpr (kStreams && !kStays) {
    return __ldcs(at);
  } else {
    return *at;
  }
}
template <bool kStays, class V>
__device__ __forceinline__ void store_vector(void* to, V value) {
  V* at = static_cast<V*>(to);
  if constexpr (kStreams && !kStays) {
    __stcs(at, value);
  } else {
    *at = value;
  }
}

// 32-bit words, in the fewest and widest accesses that an `at` aligned to min(4 * kWords, 16) bytes allows.
template <bool kStays, int kWords>
__device__ __forceinline__ void load_words(uint32_t* word, const void* at) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = load_vector<kStays, uint4>(static_cast<const uint32_t*>(at) + i);
      word[i] = four.x;
      word[i + 1] = four.y;
      word[i + 2] = four.z;
      word[i + 3] = four.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 two = load_vector<kStays, uint2>(at);
    word[0] = two.x;
    word[1] = two.y;
  } else {
    static_assert(kWords == 1);
    word[0] = load_vector<kStays, uint32_t>(at);
  }
}
template <bool kStays, int kWords>
__device__ __forceinline__ void store_words(void* at, const uint32_t* word) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      store_vector<kStays>(static_cast<uint32_t*>(at) + i, uint4{word[i], word[i + 1], word[i + 2], word[i + 3]});
    }
  } else if constexpr (kWords == 2) {
    store_vector<kStays>(at, uint2{word[0], word[1]});
  } else {
    static_assert(kWords == 1);
    store_vector<kStays>(at, word[0]);
  }
}

BW_HD double double_of_bits(uint64_t bits) { return __builtin_bit_cast(double, bits); }
BW_HD uint64_t bits_of_double(double value) { return __builtin_bit_cast(uint64_t, value); }

template <DType kType>
inline constexpr int kSizeOf = static_cast<int>(size_of(kType));

// The type in which elements of a dtype are computed.
template <DType kType>
using RealOf = std::conditional_t<kType == DType::kFloat64, double, float>;

// Calls use.template operator()<dtype>() for the float dtypes; others are refused by the host, which knows them.
template <class Use>
__device__ __forceinline__ void with_float_dtype(DType dtype, const Use& use) {
  if (dtype == DType::kFloat32) {
    use.template operator()<DType::kFloat32>();
  } else if (dtype == DType::kBFloat16) {
    use.template operator()<DType::kBFloat16>();
  } else if (dtype == DType::kFloat16) {
    use.template operator()<DType::kFloat16>();
  } else if (dtype == DType::kFloat64) {
    use.template operator()<DType::kFloat64>();
  }
}

// kNumel consecutive elements, not converted: several can be loaded, all in flight at once, before the first is used.
template <DType kType, int kNumel>
struct Lanes {
  using Real = RealOf<kType>;
  static constexpr int kBytes = kNumel * kSizeOf<kType>;
  static constexpr int kWords = kBytes / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const void* at) { load_words<false, kWords>(word, at); }
  __device__ __forceinline__ void load_to_stay(const void* at) { load_words<true, kWords>(word, at); }
  __device__ __forceinline__ void store(void* at) const { store_words<false, kWords>(at, word); }
  __device__ __forceinline__ void store_to_stay(void* at) const { store_words<true, kWords>(at, word); }

  __device__ __forceinline__ uint16_t bits16(int i) const { return static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16)); }
  __device__ __forceinline__ void set_bits16(int i, uint16_t bits) {
    const uint32_t shifted = uint32_t{bits} << (i % 2 * 16);
    word[i / 2] = (word[i / 2] & (i % 2 == 0 ? 0xffff0000u : 0x0000ffffu)) | shifted;
  }

  __device__ __forceinline__ Real get(int i) const {
    if constexpr (kType == DType::kFloat32) {
      return float_of_bits(word[i]);
    } else if constexpr (kType == DType::kFloat64) {
      return double_of_bits((uint64_t{word[2 * i + 1]} << 32) | word[2 * i]);
    } else if constexpr (kType == DType::kBFloat16) {
      return widen_bf16(bits16(i));
    } else {
      static_assert(kType == DType::kFloat16);
      return widen_fp16(bits16(i));
    }
  }
  // Rounded to nearest even.
  __device__ __forceinline__ void set(int i, Real value) {
    if constexpr (kType == DType::kFloat32) {
      word[i] = bits_of_float(value);
    } else if constexpr (kType == DType::kFloat64) {
      const uint64_t bits = bits_of_double(value);
      word[2 * i] = static_cast<uint32_t>(bits);
      word[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
    } else if constexpr (kType == DType::kBFloat16) {
      set_bits16(i, round_to_bf16(value));
    } else {
      static_assert(kType == DType::kFloat16);
      set_bits16(i, round_to_fp16(value));
    }
  }
};

// Element i of `numel`-element arrays of any alignment.
template <DType kType>
using BitsOf = std::conditional_t<kSizeOf<kType> == 2, uint16_t, RealOf<kType>>;

template <DType kType>
__device__ __forceinline__ RealOf<kType> load_element(const void* array, int64_t i) {
  const BitsOf<kType> value = static_cast<const BitsOf<kType>*>(array)[i];
  if constexpr (kType == DType::kBFloat16) {
    return widen_bf16(value);
  } else if constexpr (kType == DType::kFloat16) {
    return widen_fp16(value);
  } else {
    return value;
  }
}
// Rounded to nearest even.
template <DType kType>
__device__ __forceinline__ void store_element(void* array, int64_t i, RealOf<kType> value) {
  BitsOf<kType>& to = static_cast<BitsOf<kType>*>(array)[i];
  if constexpr (kType == DType::kBFloat16) {
    to = round_to_bf16(value);
  } else if constexpr (kType == DType::kFloat16) {
    to = round_to_fp16(value);
  } else {
    to = value;
  }
}

}  // namespace bucketwheel
