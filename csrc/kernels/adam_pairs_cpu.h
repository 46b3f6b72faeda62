// Adam over rows whose parameters, gradients and states are all bfloat16, and without a master.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
//
// With 14 bytes an element instead of 28, memory is not the limit, but instructions and the latency of square roots
// and divisions are. So elements are taken in pairs, which saves most instructions of widening and packing; and the
// second half of the formula (the weights, with the long latencies) is interleaved with the first half of the next run
// (the moments).
#pragma once

#include <cstdint>

#include "kernels/cpu_kernels.h"
#include "kernels/float16.h"
#include "kernels/random_cpu.h"

namespace bucketwheel {
namespace {

// Prefetches a block far enough ahead while this one is computed: the processor's own prefetcher stops at each page.
inline constexpr int64_t kBlockNumel = 64;
inline constexpr int64_t kAhead = 512;

template <class T>
BW_HD void prefetch_block(const T* x) {
  for (int64_t line = 0; line < kBlockNumel; line += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(x + line);
  }
}

// Two elements in a word, however aligned. Widening and rounding them needs no exchange between the lanes of a vector.
using Pair = uint32_t __attribute__((aligned(2), may_alias));

BW_HD uint32_t pair_of(uint32_t first_bits, uint32_t second_bits) {
  return (first_bits >> 16) | (second_bits & 0xffff0000u);
}

inline constexpr int64_t kPairAhead = 1024;  // elements
inline constexpr int64_t kPairs = 128;       // of a run
static_assert(2 * kPairs % (kRandomGroup * kRandomBlockNumel) == 0, "fill_random() fills a run exactly");

// Some pairs between the two halves of their step: the moments, and the weights.
struct PairRun {
  Pair* p;
  const Pair* g;
  Pair* m;
  Pair* v;
  alignas(64) float m_floats[2][kPairs];
  alignas(64) float v_floats[2][kPairs];
  alignas(64) Pair random_v[kPairs];
};

// kRandomV: v is rounded stochastically.
template <bool kDecoupledMode, bool kRandomVOn>
struct PairKind {
  static constexpr bool kDecoupled = kDecoupledMode;
  static constexpr bool kRandomV = kRandomVOn;
};

template <bool kRandom>
BW_HD uint32_t rounded_pair(float first, float second, Pair random) {
  if constexpr (kRandom) {
    return pair_of(bf16_bits_stochastic(first, random & 0xffffu), bf16_bits_stochastic(second, random >> 16));
  } else {
    return pair_of(bf16_bits(first), bf16_bits(second));
  }
}

template <class Kind>
BW_HD void pair_moments(PairRun& run, int64_t i, const AdamScalars& s) {
  const uint32_t p = Kind::kDecoupled ? 0 : run.p[i];
  float m0 = float_of_bits(run.m[i] << 16), m1 = float_of_bits(run.m[i] & 0xffff0000u);
  float v0 = float_of_bits(run.v[i] << 16), v1 = float_of_bits(run.v[i] & 0xffff0000u);
  adam_moments<float>(float_of_bits(p << 16), float_of_bits(run.g[i] << 16), m0, v0, s, Kind::kDecoupled);
  adam_moments<float>(float_of_bits(p & 0xffff0000u), float_of_bits(run.g[i] & 0xffff0000u), m1, v1, s,
                      Kind::kDecoupled);
  run.m_floats[0][i] = m0;
  run.m_floats[1][i] = m1;
  run.v_floats[0][i] = v0;
  run.v_floats[1][i] = v1;
  run.m[i] = rounded_pair<false>(m0, m1, 0);
  run.v[i] = rounded_pair<Kind::kRandomV>(v0, v1, Kind::kRandomV ? run.random_v[i] : 0);
}

template <class Kind>
BW_HD void pair_weights(PairRun& run, int64_t i, const AdamScalars& s) {
  const float p0 =
      adam_weight<float>(float_of_bits(run.p[i] << 16), run.m_floats[0][i], run.v_floats[0][i], s, Kind::kDecoupled);
  const float p1 = adam_weight<float>(float_of_bits(run.p[i] & 0xffff0000u), run.m_floats[1][i], run.v_floats[1][i], s,
                                      Kind::kDecoupled);
  run.p[i] = rounded_pair<false>(p0, p1, 0);
}

// The pairs from element i of the row on, where a block of random bits begins.
template <class Kind>
void start_run(PairRun& run, const AdamRow& row, const AdamPass& pass, int64_t i, int64_t pairs) {
  const int64_t first_block = (row.param_begin + i) / kRandomBlockNumel;
  const int64_t blocks = random_blocks(2 * pairs);
  if constexpr (Kind::kRandomV) {
    fill_random(reinterpret_cast<uint16_t*>(run.random_v), blocks, pass.seed, row.param, first_block, pass.step);
  }
  const auto at = [i](const void* base) { return static_cast<uint16_t*>(const_cast<void*>(base)) + i; };
  run.p = reinterpret_cast<Pair*>(at(row.p));
  run.g = reinterpret_cast<const Pair*>(at(row.g));
  run.m = reinterpret_cast<Pair*>(at(row.m));
  run.v = reinterpret_cast<Pair*>(at(row.v));
}

// The weights of one full run and the moments of the next.
template <class Kind>
BW_HD void two_runs(PairRun& weights, PairRun& moments, const AdamScalars& s) {
  constexpr int64_t kBlock = kBlockNumel / 2;
  for (int64_t i = 0; i < kPairs; i += kBlock) {
    prefetch_block(reinterpret_cast<const uint16_t*>(moments.p + i) + kPairAhead);
    prefetch_block(reinterpret_cast<const uint16_t*>(moments.g + i) + kPairAhead);
    prefetch_block(reinterpret_cast<const uint16_t*>(moments.m + i) + kPairAhead);
    prefetch_block(reinterpret_cast<const uint16_t*>(moments.v + i) + kPairAhead);
    BW_ELEMENTWISE
    for (int64_t k = i; k < i + kBlock; ++k) {
      pair_weights<Kind>(weights, k, s);
      pair_moments<Kind>(moments, k, s);
    }
  }
}

// The elements [begin, begin + n) of the row, n even; a block of random bits begins with the first.
template <class Kind>
void adam_pairs(const AdamRow& row, const AdamPass& pass, const AdamScalars& scalars, int64_t begin, int64_t n) {
  const AdamScalars s = scalars;
  PairRun runs[2];
  int64_t before = 0;  // pairs in the other run
  for (int64_t i = 0, turn = 0; i < n || before > 0; i += 2 * kPairs, turn ^= 1) {
    PairRun& run = runs[turn];
    PairRun& other = runs[turn ^ 1];
    const int64_t left = i < n ? (n - i) / 2 : 0;
    const int64_t pairs = left < kPairs ? left : kPairs;
    if (pairs > 0) {
      start_run<Kind>(run, row, pass, begin + i, pairs);
    }
    if (pairs == kPairs && before == kPairs) {
      two_runs<Kind>(other, run, s);
    } else {
      BW_ELEMENTWISE
      for (int64_t k = 0; k < before; ++k) {
        pair_weights<Kind>(other, k, s);
      }
      BW_ELEMENTWISE
      for (int64_t k = 0; k < pairs; ++k) {
        pair_moments<Kind>(run, k, s);
      }
    }
    before = pairs;
  }
}

}  // namespace
}  // namespace bucketwheel
