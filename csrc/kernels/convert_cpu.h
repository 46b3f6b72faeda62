// Element types as types, casts and additions of arrays, and copies past the cache.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/platform.h"
#include "kernels/float16.h"

namespace bucketwheel {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Exact.
BW_HD float widened(float x) { return x; }
BW_HD float widened(BFloat16 x) { return widen_bf16(x.bits); }
BW_HD float widened(Float16 x) { return widen_fp16(x.bits); }
BW_HD double widened(double x) { return x; }

// To nearest even.
BW_HD void put(float& to, float value) { to = value; }
BW_HD void put(BFloat16& to, float value) { to.bits = round_to_bf16(value); }
BW_HD void put(Float16& to, float value) { to.bits = round_to_fp16(value); }
BW_HD void put(double& to, double value) { to = value; }

template <class T>
void to_floats(float* __restrict__ to, const T* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<float>(widened(from[i]));
  }
}
template <class T>
void from_floats(T* __restrict__ to, const float* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    put(to[i], from[i]);
  }
}

// float16 by the processor's conversions where it has them; the results are those of float16.h, NaN payloads excepted.
#if defined(__AVX512F__)
inline constexpr int64_t kHalves = 16;
BW_HD void widen_halves(float* to, const Float16* from) {
  _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from))));
}
BW_HD void round_halves(Float16* to, const float* from) {
  const __m512 x = _mm512_loadu_ps(from);
  const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm256_mask_set1_epi16(halves, is_nan, 0x7e00));
}
#elif defined(__F16C__)
inline constexpr int64_t kHalves = 8;
BW_HD void widen_halves(float* to, const Float16* from) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
}
BW_HD void round_halves(Float16* to, const float* from) {
  const __m256 x = _mm256_loadu_ps(from);
  const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(is_nan), _mm256_extracti128_si256(is_nan, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm_blendv_epi8(halves, _mm_set1_epi16(0x7e00), narrow));
}
#else
inline constexpr int64_t kHalves = 1;
BW_HD void widen_halves(float* to, const Float16* from) { *to = widened(*from); }
BW_HD void round_halves(Float16* to, const float* from) { put(*to, *from); }
#endif

void to_floats(float* __restrict__ to, const Float16* __restrict__ from, int64_t n) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
    widen_halves(to + i, from + i);
  }
  for (; i < n; ++i) {
    to[i] = widened(from[i]);
  }
}
void from_floats(Float16* __restrict__ to, const float* __restrict__ from, int64_t n) {
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
    round_halves(to + i, from + i);
  }
  for (; i < n; ++i) {
    put(to[i], from[i]);
  }
}

// Of any float type except float32. The caller passes no other dtypes.
void widen(float* to, const void* from, DType dtype, int64_t n) {
  if (dtype == DType::kBFloat16) {
    to_floats(to, static_cast<const BFloat16*>(from), n);
  } else if (dtype == DType::kFloat16) {
    to_floats(to, static_cast<const Float16*>(from), n);
  } else {
    to_floats(to, static_cast<const double*>(from), n);
  }
}
void narrow(void* to, DType dtype, const float* from, int64_t n) {
  if (dtype == DType::kBFloat16) {
    from_floats(static_cast<BFloat16*>(to), from, n);
  } else if (dtype == DType::kFloat16) {
    from_floats(static_cast<Float16*>(to), from, n);
  } else {
    from_floats(static_cast<double*>(to), from, n);
  }
}

void convert(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n) {
  if (from_dtype == DType::kFloat32) {
    return narrow(to, to_dtype, static_cast<const float*>(from), n);
  }
  if (to_dtype == DType::kFloat32) {
    return widen(static_cast<float*>(to), from, from_dtype, n);
  }
  constexpr int64_t kBlock = 1024;  // its floats stay in the first-level cache
  alignas(64) float room[kBlock];
  const int64_t to_bytes = to_dtype == DType::kFloat64 ? 8 : 2;
  const int64_t from_bytes = from_dtype == DType::kFloat64 ? 8 : 2;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t numel = n - begin < kBlock ? n - begin : kBlock;
    widen(room, static_cast<const char*>(from) + begin * from_bytes, from_dtype, numel);
    narrow(static_cast<char*>(to) + begin * to_bytes, to_dtype, room, numel);
  }
}

// Calls use() with a value of the type that is `dtype`, one of the four float types.
template <class Use>
BW_HD void with_float(DType dtype, const Use& use) {
  if (dtype == DType::kFloat32) {
    use(float{});
  } else if (dtype == DType::kBFloat16) {
    use(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    use(Float16{});
  } else {
    use(double{});
  }
}

template <class To, class From>
void add_typed(To* to, const From* from, int64_t n) {
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    put(to[i], static_cast<decltype(widened(To{}))>(widened(to[i]) + widened(from[i])));
  }
}

void add(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n) {
  with_float(to_dtype, [&](auto out) {
    with_float(from_dtype,
               [&](auto in) { add_typed(static_cast<decltype(out)*>(to), static_cast<const decltype(in)*>(from), n); });
  });
}

void copy_past_cache(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  const size_t to_line = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  const size_t head = to_line < bytes ? to_line : bytes;
  __builtin_memcpy(target, source, head);
  const size_t body = (bytes - head) / kLine * kLine;
  for (size_t i = head; i < head + body; i += kLine) {
    store_line_past_cache(target + i, source + i);
  }
  fence_past_cache();
  __builtin_memcpy(target + head + body, source + head + body, bytes - head - body);
}

}  // namespace
}  // namespace bucketwheel
