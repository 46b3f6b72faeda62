// Adam over one chunk.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cpu_kernels.h"
#include "kernels/float16.h"

namespace bucketwheel {
namespace {

// A block far enough ahead is asked for while this one is computed: the processor's own prefetcher stops at each page.
inline constexpr int64_t kBlockNumel = 64;
inline constexpr int64_t kAhead = 512;

template <class T>
BW_HD void prefetch_block(const T* x) {
  for (int64_t line = 0; line < kBlockNumel; line += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(x + line);
  }
}

// P and G are float or uint16_t (bfloat16 bits). A bfloat16 parameter is computed on its float master and rounded from it.
template <class P, class G, bool kDecoupled>
BW_HD void adam_range(P* p, const G* g, float* m, float* v, float* master, int64_t n, const AdamScalars& s) {
  constexpr bool kHasMaster = !std::is_same_v<P, float>;
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    float grad;
    if constexpr (std::is_same_v<G, float>) {
      grad = g[i];
    } else {
      grad = widen_bf16(g[i]);
    }
    float mi = m[i];
    float vi = v[i];
    if constexpr (kHasMaster) {
      float weight = master[i];
      adam_element<float>(weight, grad, mi, vi, nullptr, s, kDecoupled);
      master[i] = weight;
      p[i] = round_to_bf16(weight);
    } else {
      float weight = p[i];
      adam_element<float>(weight, grad, mi, vi, nullptr, s, kDecoupled);
      p[i] = weight;
    }
    m[i] = mi;
    v[i] = vi;
  }
}

template <class P, class G, bool kDecoupled>
void adam_chunk(const AdamPointers& at, int64_t n, const AdamScalars& scalars) {
  constexpr bool kHasMaster = !std::is_same_v<P, float>;
  P* p = static_cast<P*>(at.p);
  const G* g = static_cast<const G*>(at.g);
  float* m = at.m;
  float* v = at.v;
  float* master = at.master;
  const AdamScalars s = scalars;
  const auto step_to = [&](int64_t begin, int64_t numel) {
    adam_range<P, G, kDecoupled>(p + begin, g + begin, m + begin, v + begin, kHasMaster ? master + begin : nullptr,
                                 numel, s);
  };
  int64_t i = 0;
  for (; i + kBlockNumel <= n; i += kBlockNumel) {
    prefetch_block(p + i + kAhead);
    prefetch_block(g + i + kAhead);
    prefetch_block(m + i + kAhead);
    prefetch_block(v + i + kAhead);
    if constexpr (kHasMaster) {
      prefetch_block(master + i + kAhead);
    }
    step_to(i, kBlockNumel);
  }
  step_to(i, n - i);
}

}  // namespace
}  // namespace bucketwheel
