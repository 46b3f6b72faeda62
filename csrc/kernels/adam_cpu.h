// Adam over one chunk.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

// P and G are float or uint16_t (bfloat16 bits). A bfloat16 parameter is computed on its float master and rounded from it.
template <class P, class G, bool kDecoupled>
void adam_chunk(const AdamPointers& at, int64_t n, const AdamScalars& scalars) {
  constexpr bool kHasMaster = !std::is_same_v<P, float>;
  P* p = static_cast<P*>(at.p);
  const G* g = static_cast<const G*>(at.g);
  float* m = at.m;
  float* v = at.v;
  float* master = at.master;
  const AdamScalars s = scalars;
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
      adam_element<kDecoupled>(weight, grad, mi, vi, s);
      master[i] = weight;
      p[i] = round_to_bf16(weight);
    } else {
      float weight = p[i];
      adam_element<kDecoupled>(weight, grad, mi, vi, s);
      p[i] = weight;
    }
    m[i] = mi;
    v[i] = vi;
  }
}

}  // namespace
}  // namespace bucketwheel
