// Adam over one chunk of a row.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
//
// The usual kinds of rows have a loop of their own, directly over memory (adam_blocks; adam_pairs_cpu.h if everything
// is bfloat16). All others use one loop over floats (adam_staged): stage by stage, what is not float32 is converted
// into a buffer in the first-level cache and back.
#pragma once

#include <cstdint>

#include "kernels/adam_pairs_cpu.h"
#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"
#include "kernels/random_cpu.h"

namespace bucketwheel {
namespace {

// ---- masters that follow their parameters: AdamPass::resync

BW_HD float followed(float master, BFloat16 param) { return followed_bf16(master, param.bits); }
BW_HD float followed(float master, Float16 param) { return followed_fp16(master, param.bits); }

// kBlockNumel masters, rounded in the fewest instructions by which none becomes a parameter that it does not round to. Of
// those halfway between two some become another one.
BW_HD void round_roughly(BFloat16* __restrict__ to, const float* __restrict__ from) {
  for (int64_t i = 0; i < kBlockNumel; ++i) {
    to[i].bits = static_cast<uint16_t>((bits_of_float(from[i]) + 0x8000u) >> 16);
  }
}
BW_HD void round_roughly(Float16* to, const float* from) {
  for (int64_t i = 0; i < kBlockNumel; i += kHalves) {
    round_halves(to + i, from + i);
  }
}

template <class P>
__attribute__((noinline)) void follow_each(float* __restrict__ masters, const P* __restrict__ params, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    masters[i] = followed(masters[i], params[i]);
  }
}

// n <= kBlockNumel. Nearly always nobody has written to a parameter: one comparison of a whole block finds that out in a
// third of the time that follow_each() takes.
template <class P>
BW_HD void follow_block(float* masters, const P* params, int64_t n) {
  if (n == kBlockNumel) {
    alignas(64) P rounded[kBlockNumel];
    round_roughly(rounded, masters);
    if (__builtin_memcmp(rounded, params, sizeof(rounded)) == 0) {
      return;
    }
  }
  follow_each(masters, params, n);
}
template <class P>
void follow_params(float* masters, const void* params, int64_t n) {
  for (int64_t i = 0; i < n; i += kBlockNumel) {
    follow_block(masters + i, static_cast<const P*>(params) + i, kBlockNumel < n - i ? kBlockNumel : n - i);
  }
}

// ---- loops over memory

// What is kept beside a parameter: its master, or its remainder.
template <class T, AdamWeight kWeight>
struct BesideParam {
  using Type = T;
};
template <class T>
struct BesideParam<T, AdamWeight::kRemainder> {
  using Type = uint16_t;
};

// The arrays of some elements, computed in T, with states of type S.
template <class T, class P, class G, class S, AdamWeight kWeightIn>
struct AdamArrays {
  static constexpr AdamWeight kWeight = kWeightIn;
  P* p;
  const G* g;
  S* m;
  S* v;
  S* vmax;
  typename BesideParam<T, kWeight>::Type* master;

  BW_HD AdamArrays from(int64_t i) const {
    return {p + i, g + i, m + i, v + i, vmax == nullptr ? nullptr : vmax + i, master == nullptr ? nullptr : master + i};
  }
};

// What a loop is compiled for. kRandom: v is rounded by the bits in `random`.
template <bool kDecoupledMode, bool kAmsgradOn, bool kRandomOn>
struct RangeKind {
  static constexpr bool kDecoupled = kDecoupledMode;
  static constexpr bool kAmsgrad = kAmsgradOn;
  static constexpr bool kRandom = kRandomOn;
};

template <class Kind, class T, class P, class G, class S, AdamWeight kWeight>
BW_HD void adam_range(const AdamArrays<T, P, G, S, kWeight>& at, int64_t n, const AdamScalarsOf<T>& s,
                      const uint16_t* random) {
  P* p = at.p;
  const G* g = at.g;
  S* m = at.m;
  S* v = at.v;
  S* vmax = at.vmax;
  auto* master = at.master;
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    T mi = widened(m[i]);
    T vi = widened(v[i]);
    T xi = Kind::kAmsgrad ? widened(vmax[i]) : T{0};
    T weight;
    if constexpr (kWeight == AdamWeight::kMaster) {
      weight = master[i];
    } else if constexpr (kWeight == AdamWeight::kRemainder) {
      weight = join_master({p[i].bits, master[i]});
    } else {
      weight = p[i];
    }
    adam_element<T>(weight, widened(g[i]), mi, vi, Kind::kAmsgrad ? &xi : nullptr, s, Kind::kDecoupled);
    if constexpr (kWeight == AdamWeight::kRemainder) {
      const SplitMaster split = split_master(weight);
      p[i].bits = split.high;
      master[i] = split.low;
    } else {
      if constexpr (kWeight == AdamWeight::kMaster) {
        master[i] = weight;
      }
      put(p[i], weight);
    }
    put(m[i], mi);
    if constexpr (Kind::kRandom) {
      v[i].bits = round_to_bf16_stochastic(vi, random[i]);
    } else {
      put(v[i], vi);
    }
    if constexpr (Kind::kAmsgrad) {
      put(vmax[i], xi);
    }
  }
}

// The elements of the pass from `begin` on. kRandom: a block of random bits begins at `begin`. A block of bits is made
// right before its elements, so that the processor makes it while it waits for the divisions of the block before.
template <class Kind, class T, class P, class G, class S, AdamWeight kWeight>
void adam_blocks(const AdamArrays<T, P, G, S, kWeight>& at, const AdamRow& row, const AdamPass& pass, int64_t begin,
                 const AdamScalarsOf<T>& scalars) {
  const AdamScalarsOf<T> s = scalars;
  const int64_t n = pass.begin + pass.numel - begin;
  alignas(64) uint16_t random[kBlockNumel];
  const auto make_random = [&](int64_t i, int64_t numel) {
    if constexpr (Kind::kRandom) {
      fill_random(random, random_blocks(numel), pass.seed, row.param, (row.param_begin + begin + i) / kRandomBlockNumel,
                  pass.step);
    }
  };
  const auto follow = [&](int64_t i, int64_t numel) {
    if constexpr (kWeight == AdamWeight::kMaster) {
      if (pass.resync) {
        follow_block(at.master + i, at.p + i, numel);
      }
    }
  };
  int64_t i = 0;
  for (; i + kBlockNumel <= n; i += kBlockNumel) {
    const auto ahead = at.from(i + kAhead);
    prefetch_block(ahead.p);
    prefetch_block(ahead.g);
    prefetch_block(ahead.m);
    prefetch_block(ahead.v);
    if constexpr (Kind::kAmsgrad) {
      prefetch_block(ahead.vmax);
    }
    if constexpr (kWeight != AdamWeight::kParam) {
      prefetch_block(ahead.master);
    }
    make_random(i, kBlockNumel);
    follow(i, kBlockNumel);
    adam_range<Kind>(at.from(i), kBlockNumel, s, random);
  }
  make_random(i, n - i);
  follow(i, n - i);
  adam_range<Kind>(at.from(i), n - i, s, random);
}

template <class T>
T* place(void* base, int64_t i) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + i;
}

// The elements of the pass from `begin` (an element of the row) on.
template <bool kAmsgrad, bool kRandom, class T, class P, class G, class S, AdamWeight kWeight>
void adam_arrays(const AdamRow& row, const AdamPass& pass, int64_t begin, const AdamScalarsOf<T>& scalars) {
  const AdamArrays<T, P, G, S, kWeight> at = {
      place<P>(row.p, begin),    static_cast<const G*>(row.g) + begin,
      place<S>(row.m, begin),    place<S>(row.v, begin),
      place<S>(row.vmax, begin), place<typename BesideParam<T, kWeight>::Type>(row.master, begin)};
  pass.decoupled ? adam_blocks<RangeKind<true, kAmsgrad, kRandom>>(at, row, pass, begin, scalars)
                 : adam_blocks<RangeKind<false, kAmsgrad, kRandom>>(at, row, pass, begin, scalars);
}

// ---- stages

inline constexpr int64_t kStageNumel = 256;
inline constexpr int64_t kStageAhead = 512;
static_assert(kStageNumel % (kRandomGroup * kRandomBlockNumel) == 0, "fill_random() fills a stage exactly");
static_assert(kBlockNumel % (kRandomGroup * kRandomBlockNumel) == 0, "and a block");

BW_HD void* advanced(void* base, DType dtype, int64_t i) {
  return static_cast<char*>(base) + i * (dtype == DType::kFloat32 ? 4 : 2);
}

// Prefetches the stage after next, as adam_blocks does with blocks.
void prefetch_stage(const void* x, DType dtype, int64_t n) {
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t line = 0; line < n * bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(x) + kStageAhead * bytes + line);
  }
}

// The elements as floats: where they are, or converted into `room`.
float* as_floats(void* x, DType dtype, int64_t n, float* room) {
  prefetch_stage(x, dtype, n);
  if (dtype == DType::kFloat32) {
    return static_cast<float*>(x);
  }
  widen(room, x, dtype, n);
  return room;
}

void join_masters(float* __restrict__ to, const uint16_t* __restrict__ high, const uint16_t* __restrict__ low,
                  int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = join_master({high[i], low[i]});
  }
}
void split_masters(uint16_t* __restrict__ high, uint16_t* __restrict__ low, const float* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const SplitMaster split = split_master(from[i]);
    high[i] = split.high;
    low[i] = split.low;
  }
}
void narrow_stochastic(uint16_t* __restrict__ to, const float* __restrict__ from, const uint16_t* __restrict__ random,
                       int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = round_to_bf16_stochastic(from[i], random[i]);
  }
}

// `element`: the first one's place in its parameter.
void store_stochastic(void* to, const float* from, int64_t n, const AdamRow& row, int64_t element,
                      const AdamPass& pass) {
  alignas(64) uint16_t random[kStageNumel];
  const int64_t skipped = element % kRandomBlockNumel;
  fill_random(random, random_blocks(skipped + n), pass.seed, row.param, element / kRandomBlockNumel, pass.step);
  narrow_stochastic(static_cast<uint16_t*>(to), from, random + skipped, n);
}

// One stage: the elements [i, i + n) of the row.
void adam_stage(const AdamRow& row, const AdamPass& pass, const AdamScalars& s, int64_t i, int64_t n) {
  alignas(64) float rooms[5][kStageNumel];
  void* p = advanced(row.p, row.p_dtype, i);
  void* m = advanced(row.m, row.state_dtype, i);
  void* v = advanced(row.v, row.state_dtype, i);
  void* vmax = row.vmax == nullptr ? nullptr : advanced(row.vmax, row.state_dtype, i);
  float* weight = nullptr;
  switch (row.weight) {
    case AdamWeight::kParam:
      weight = as_floats(p, row.p_dtype, n, rooms[0]);
      break;
    case AdamWeight::kMaster:
      prefetch_stage(p, row.p_dtype, n);
      weight = as_floats(static_cast<float*>(row.master) + i, DType::kFloat32, n, nullptr);
      if (pass.resync) {
        row.p_dtype == DType::kBFloat16 ? follow_params<BFloat16>(weight, p, n) : follow_params<Float16>(weight, p, n);
      }
      break;
    case AdamWeight::kRemainder:
      prefetch_stage(p, row.p_dtype, n);
      prefetch_stage(static_cast<uint16_t*>(row.master) + i, row.p_dtype, n);
      weight = rooms[0];
      join_masters(weight, static_cast<uint16_t*>(p), static_cast<uint16_t*>(row.master) + i, n);
      break;
  }
  const float* g = as_floats(advanced(const_cast<void*>(row.g), row.g_dtype, i), row.g_dtype, n, rooms[1]);
  float* m_floats = as_floats(m, row.state_dtype, n, rooms[2]);
  float* v_floats = as_floats(v, row.state_dtype, n, rooms[3]);
  float* vmax_floats = vmax == nullptr ? nullptr : as_floats(vmax, row.state_dtype, n, rooms[4]);

  const AdamArrays<float, float, float, float, AdamWeight::kParam> at = {weight,   g,           m_floats,
                                                                         v_floats, vmax_floats, nullptr};
  if (vmax == nullptr) {
    pass.decoupled ? adam_range<RangeKind<true, false, false>>(at, n, s, nullptr)
                   : adam_range<RangeKind<false, false, false>>(at, n, s, nullptr);
  } else {
    pass.decoupled ? adam_range<RangeKind<true, true, false>>(at, n, s, nullptr)
                   : adam_range<RangeKind<false, true, false>>(at, n, s, nullptr);
  }

  if (row.weight == AdamWeight::kRemainder) {
    split_masters(static_cast<uint16_t*>(p), static_cast<uint16_t*>(row.master) + i, weight, n);
  } else if (row.p_dtype != DType::kFloat32) {
    narrow(p, row.p_dtype, weight, n);
  }
  if (row.state_dtype != DType::kFloat32) {
    narrow(m, row.state_dtype, m_floats, n);
    if (pass.stochastic) {
      store_stochastic(v, v_floats, n, row, row.param_begin + i, pass);
    } else {
      narrow(v, row.state_dtype, v_floats, n);
    }
    if (vmax != nullptr) {
      narrow(vmax, row.state_dtype, vmax_floats, n);
    }
  }
}

void adam_staged(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  // The first stage ends at the end of a block of random bits, so that no later one starts within one.
  int64_t n = kStageNumel - (row.param_begin + pass.begin) % kRandomBlockNumel;
  for (int64_t done = 0; done < pass.numel; done += n, n = kStageNumel) {
    n = n < pass.numel - done ? n : pass.numel - done;
    adam_stage(row, pass, s, pass.begin + done, n);
  }
}

// ---- which rows go where

template <bool kDecoupled>
void adam_pairs_of(const AdamRow& row, const AdamPass& pass, const AdamScalars& s, int64_t begin, int64_t n) {
  pass.stochastic ? adam_pairs<PairKind<kDecoupled, true>>(row, pass, s, begin, n)
                  : adam_pairs<PairKind<kDecoupled, false>>(row, pass, s, begin, n);
}

// Steps the elements of the pass before the first whole block of random bits. Returns how many they are.
int64_t adam_head(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  const int64_t lead = (kRandomBlockNumel - (row.param_begin + pass.begin) % kRandomBlockNumel) % kRandomBlockNumel;
  const int64_t head = lead < pass.numel ? lead : pass.numel;
  if (head > 0) {
    adam_stage(row, pass, s, pass.begin, head);
  }
  return head;
}

void adam_bf16(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  // The head, an even number, and the last one.
  const int64_t head = adam_head(row, pass, s);
  const int64_t even = (pass.numel - head) / 2 * 2;
  const int64_t begin = pass.begin + head;
  pass.decoupled ? adam_pairs_of<true>(row, pass, s, begin, even) : adam_pairs_of<false>(row, pass, s, begin, even);
  if (head + even < pass.numel) {
    adam_stage(row, pass, s, begin + even, 1);
  }
}

// Rows without amsgrad that have a loop of their own. With bfloat16 states the elements before the first whole block
// of random bits go by stages.
template <class P, class G, class S, AdamWeight kWeight>
void adam_direct(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  constexpr bool kMayBeRandom = sizeof(S) == 2;
  if constexpr (kMayBeRandom) {
    if (pass.stochastic) {
      const int64_t head = adam_head(row, pass, s);
      return adam_arrays<false, true, float, P, G, S, kWeight>(row, pass, pass.begin + head, s);
    }
  }
  adam_arrays<false, false, float, P, G, S, kWeight>(row, pass, pass.begin, s);
}

// As adam_direct, for float32 or bfloat16 gradients. Returns false if there is no loop for this kind of row.
template <class P, class S, AdamWeight kWeight>
bool adam_direct_of(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  if (row.g_dtype == DType::kFloat32) {
    adam_direct<P, float, S, kWeight>(row, pass, s);
  } else if (row.g_dtype == DType::kBFloat16) {
    adam_direct<P, BFloat16, S, kWeight>(row, pass, s);
  } else {
    return false;
  }
  return true;
}

bool adam_direct(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  if (row.vmax != nullptr || row.p_dtype == DType::kFloat16) {
    return false;
  }
  const bool has_float_states = row.state_dtype == DType::kFloat32;
  if (row.p_dtype == DType::kFloat32) {
    return has_float_states ? adam_direct_of<float, float, AdamWeight::kParam>(row, pass, s)
                            : adam_direct_of<float, BFloat16, AdamWeight::kParam>(row, pass, s);
  }
  switch (row.weight) {
    case AdamWeight::kMaster:
      return has_float_states ? adam_direct_of<BFloat16, float, AdamWeight::kMaster>(row, pass, s)
                              : adam_direct_of<BFloat16, BFloat16, AdamWeight::kMaster>(row, pass, s);
    case AdamWeight::kRemainder:
      return has_float_states ? adam_direct_of<BFloat16, float, AdamWeight::kRemainder>(row, pass, s)
                              : adam_direct_of<BFloat16, BFloat16, AdamWeight::kRemainder>(row, pass, s);
    case AdamWeight::kParam:
      break;
  }
  if (has_float_states || row.g_dtype != DType::kBFloat16) {
    return false;
  }
  adam_bf16(row, pass, s);
  return true;
}

void adam(const AdamRow& row, const AdamPass& pass, const AdamScalarsOf<double>& scalars) {
  if (row.p_dtype == DType::kFloat64) {
    constexpr AdamWeight kParam = AdamWeight::kParam;
    return row.vmax == nullptr
               ? adam_arrays<false, false, double, double, double, double, kParam>(row, pass, pass.begin, scalars)
               : adam_arrays<true, false, double, double, double, double, kParam>(row, pass, pass.begin, scalars);
  }
  const AdamScalars s = scalars.rounded<float>();
  if (!adam_direct(row, pass, s)) {
    adam_staged(row, pass, s);
  }
}

}  // namespace
}  // namespace bucketwheel
