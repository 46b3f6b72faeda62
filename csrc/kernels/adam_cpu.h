// Adam over one chunk of a row.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
//
// The usual kinds of rows have a loop of their own over what is in memory (adam_blocks, and adam_pairs_cpu.h for bfloat16
// alone). All others go through the same loop over floats by stages (adam_staged): what is not float32 is converted into a
// buffer in the first-level cache and back.
#pragma once

#include <cstdint>

#include "kernels/adam_pairs_cpu.h"
#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"
#include "kernels/random_cpu.h"

namespace bucketwheel {
namespace {

// The arrays of some elements, computed in T. A parameter that is not a T is rounded from its T master.
template <class T, class P, class G>
struct AdamArrays {
  P* p;
  const G* g;
  T* m;
  T* v;
  T* vmax;
  T* master;

  BW_HD AdamArrays from(int64_t i) const {
    return {p + i, g + i, m + i, v + i, vmax == nullptr ? nullptr : vmax + i, master == nullptr ? nullptr : master + i};
  }
};

template <bool kDecoupled, bool kAmsgrad, class T, class P, class G>
BW_HD void adam_range(const AdamArrays<T, P, G>& at, int64_t n, const AdamScalarsOf<T>& s) {
  constexpr bool kHasMaster = sizeof(P) != sizeof(T);
  P* p = at.p;
  const G* g = at.g;
  T* m = at.m;
  T* v = at.v;
  T* vmax = at.vmax;
  T* master = at.master;
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    T mi = m[i];
    T vi = v[i];
    T xi = kAmsgrad ? vmax[i] : T{0};
    T weight;
    if constexpr (kHasMaster) {
      weight = master[i];
    } else {
      weight = p[i];
    }
    adam_element<T>(weight, widened(g[i]), mi, vi, kAmsgrad ? &xi : nullptr, s, kDecoupled);
    if constexpr (kHasMaster) {
      master[i] = weight;
    }
    put(p[i], weight);
    m[i] = mi;
    v[i] = vi;
    if constexpr (kAmsgrad) {
      vmax[i] = xi;
    }
  }
}

template <bool kDecoupled, bool kAmsgrad, class T, class P, class G>
void adam_blocks(const AdamArrays<T, P, G>& at, int64_t n, const AdamScalarsOf<T>& scalars) {
  const AdamScalarsOf<T> s = scalars;
  int64_t i = 0;
  for (; i + kBlockNumel <= n; i += kBlockNumel) {
    const AdamArrays<T, P, G> ahead = at.from(i + kAhead);
    prefetch_block(ahead.p);
    prefetch_block(ahead.g);
    prefetch_block(ahead.m);
    prefetch_block(ahead.v);
    if constexpr (kAmsgrad) {
      prefetch_block(ahead.vmax);
    }
    if constexpr (sizeof(P) != sizeof(T)) {
      prefetch_block(ahead.master);
    }
    adam_range<kDecoupled, kAmsgrad>(at.from(i), kBlockNumel, s);
  }
  adam_range<kDecoupled, kAmsgrad>(at.from(i), n - i, s);
}

template <class T>
T* place(void* base, int64_t i) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + i;
}

template <bool kAmsgrad, class T, class P, class G>
void adam_arrays(const AdamRow& row, const AdamPass& pass, const AdamScalarsOf<T>& scalars) {
  const int64_t i = pass.begin;
  const AdamArrays<T, P, G> at = {place<P>(row.p, i),    static_cast<const G*>(row.g) + i,
                                  place<T>(row.m, i),    place<T>(row.v, i),
                                  place<T>(row.vmax, i), place<T>(row.master, i)};
  pass.decoupled ? adam_blocks<true, kAmsgrad>(at, pass.numel, scalars)
                 : adam_blocks<false, kAmsgrad>(at, pass.numel, scalars);
}

// ---- stages

inline constexpr int64_t kStageNumel = 256;
inline constexpr int64_t kStageAhead = 512;
static_assert(kStageNumel % (kRandomGroup * kRandomBlockNumel) == 0, "fill_random() fills a stage exactly");

BW_HD void* advanced(void* base, DType dtype, int64_t i) {
  return static_cast<char*>(base) + i * (dtype == DType::kFloat32 ? 4 : 2);
}

// Asks for the stage after next, as adam_blocks does for a block.
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
void store_stochastic(void* to, const float* from, int64_t n, const AdamRow& row, int64_t element, const AdamPass& pass,
                      RandomUse use) {
  alignas(64) uint16_t random[kStageNumel];
  const int64_t skipped = element % kRandomBlockNumel;
  fill_random(random, (skipped + n + kRandomBlockNumel - 1) / kRandomBlockNumel, pass.seed, row.param,
              element / kRandomBlockNumel, pass.step, use);
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

  const AdamArrays<float, float, float> at = {weight, g, m_floats, v_floats, vmax_floats, nullptr};
  if (vmax == nullptr) {
    pass.decoupled ? adam_range<true, false>(at, n, s) : adam_range<false, false>(at, n, s);
  } else {
    pass.decoupled ? adam_range<true, true>(at, n, s) : adam_range<false, true>(at, n, s);
  }

  const int64_t element = row.param_begin + i;
  if (row.weight == AdamWeight::kRemainder) {
    split_masters(static_cast<uint16_t*>(p), static_cast<uint16_t*>(row.master) + i, weight, n);
  } else if (row.weight == AdamWeight::kParam && row.p_dtype == DType::kBFloat16 && pass.stochastic_param) {
    store_stochastic(p, weight, n, row, element, pass, RandomUse::kParam);
  } else if (row.p_dtype != DType::kFloat32) {
    narrow(p, row.p_dtype, weight, n);
  }
  if (row.state_dtype != DType::kFloat32) {
    narrow(m, row.state_dtype, m_floats, n);
    if (pass.stochastic) {
      store_stochastic(v, v_floats, n, row, element, pass, RandomUse::kExpAvgSq);
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
  if (!pass.stochastic) {
    adam_pairs<PairKind<kDecoupled, false, false>>(row, pass, s, begin, n);
  } else if (pass.stochastic_param) {
    adam_pairs<PairKind<kDecoupled, true, true>>(row, pass, s, begin, n);
  } else {
    adam_pairs<PairKind<kDecoupled, true, false>>(row, pass, s, begin, n);
  }
}

void adam_bf16(const AdamRow& row, const AdamPass& pass, const AdamScalars& s) {
  // Up to where a block of random bits begins, an even number, and the last one.
  const int64_t lead = (kRandomBlockNumel - (row.param_begin + pass.begin) % kRandomBlockNumel) % kRandomBlockNumel;
  const int64_t head = lead < pass.numel ? lead : pass.numel;
  const int64_t even = (pass.numel - head) / 2 * 2;
  const int64_t begin = pass.begin + head;
  if (head > 0) {
    adam_stage(row, pass, s, pass.begin, head);
  }
  pass.decoupled ? adam_pairs_of<true>(row, pass, s, begin, even) : adam_pairs_of<false>(row, pass, s, begin, even);
  if (head + even < pass.numel) {
    adam_stage(row, pass, s, begin + even, 1);
  }
}

void adam(const AdamRow& row, const AdamPass& pass, const AdamScalarsOf<double>& scalars) {
  if (row.p_dtype == DType::kFloat64) {
    return row.vmax == nullptr ? adam_arrays<false, double, double, double>(row, pass, scalars)
                               : adam_arrays<true, double, double, double>(row, pass, scalars);
  }
  const AdamScalars s = scalars.rounded<float>();
  const bool has_float_states = row.state_dtype == DType::kFloat32 && row.vmax == nullptr;
  const bool is_float = row.p_dtype == DType::kFloat32;
  const bool is_all_bf16 = row.p_dtype == DType::kBFloat16 && row.g_dtype == DType::kBFloat16 &&
                           row.state_dtype == DType::kBFloat16 && row.vmax == nullptr &&
                           row.weight == AdamWeight::kParam;
  const bool is_master = row.p_dtype == DType::kBFloat16 && row.weight == AdamWeight::kMaster;
  if (has_float_states && is_float && row.g_dtype == DType::kFloat32) {
    adam_arrays<false, float, float, float>(row, pass, s);
  } else if (has_float_states && is_float && row.g_dtype == DType::kBFloat16) {
    adam_arrays<false, float, float, BFloat16>(row, pass, s);
  } else if (has_float_states && is_master && row.g_dtype == DType::kFloat32) {
    adam_arrays<false, float, BFloat16, float>(row, pass, s);
  } else if (has_float_states && is_master && row.g_dtype == DType::kBFloat16) {
    adam_arrays<false, float, BFloat16, BFloat16>(row, pass, s);
  } else if (is_all_bf16 && (pass.stochastic || !pass.stochastic_param)) {
    adam_bf16(row, pass, s);
  } else {
    adam_staged(row, pass, s);
  }
}

}  // namespace
}  // namespace bucketwheel
