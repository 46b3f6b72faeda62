// Adam, one element and one set of scalars: the only place where the formula is written. CPU and CUDA kernels include
// it and must agree bitwise, so every operation is IEEE-rounded (compile with -ffp-contract=off, -fmad=false), every
// fma is explicit, and the order below is part of the contract.
//
// Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (AdamW), Algorithm 2; L2 mode is Kingma & Ba, "Adam",
// Algorithm 1 with wd * p added to the gradient. For step t (from 1), in this order:
//   1.  g = g * gscale                          gscale = 1 / (world * loss_scale) * clip coefficient; < 0: maximize
//   2.  p = p * (1 - lr * wd)                   decoupled     or     g = fma(p, wd, g)     L2
//   3.  m = fma(1 - b1, g - m, m)
//   4.  v = fma((1 - b2) * g, g, v * b2)
//   5.  den = sqrt(v) / sqrt(1 - b2^t) + eps
//   6.  p = p + (-lr / (1 - b1^t) * m) / den
// Each coefficient is computed in double and rounded once: 1 - b2 in float would bias v by 1.3e-5 relative at b2 = 0.999.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

// What a parameter group holds.
struct AdamGroup {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

// What one element needs beside itself, constant over a row.
struct AdamScalars {
  float gscale;
  float decay;  // 1 - lr * wd, or wd in L2 mode
  float one_minus_b1;
  float b2;
  float one_minus_b2;
  float bc2_sqrt;  // sqrt(1 - b2^t)
  float eps;
  float neg_step;  // -lr / (1 - b1^t)
};

// base^n by repeated squaring: multiplications only, so equal on every device (pow() is not).
BW_HD double pow_int(double base, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) {
      result *= base;
    }
    base *= base;
  }
  return result;
}

// The scalars of step `step`, counted from 1. `gscale` is the factor of the gradient, negated to maximize (exact).
BW_HD AdamScalars adam_scalars(const AdamGroup& group, int64_t step, float gscale, bool decoupled, bool maximize) {
  const double bias_correction1 = 1.0 - pow_int(group.beta1, step);
  const double bias_correction2 = 1.0 - pow_int(group.beta2, step);
  AdamScalars out;
  out.gscale = maximize ? -gscale : gscale;
  out.decay = static_cast<float>(decoupled ? 1.0 - group.lr * group.weight_decay : group.weight_decay);
  out.one_minus_b1 = static_cast<float>(1.0 - group.beta1);
  out.b2 = static_cast<float>(group.beta2);
  out.one_minus_b2 = static_cast<float>(1.0 - group.beta2);
  out.bc2_sqrt = static_cast<float>(__builtin_sqrt(bias_correction2));
  out.eps = static_cast<float>(group.eps);
  out.neg_step = static_cast<float>(-(group.lr / bias_correction1));
  return out;
}

template <bool kDecoupled>
BW_HD void adam_element(float& p, float g, float& m, float& v, const AdamScalars& s) {
  g = g * s.gscale;  // 1
  if constexpr (kDecoupled) {
    p = p * s.decay;  // 2
  } else {
    g = __builtin_fmaf(p, s.decay, g);  // 2
  }
  m = __builtin_fmaf(s.one_minus_b1, g - m, m);               // 3
  v = __builtin_fmaf(s.one_minus_b2 * g, g, v * s.b2);        // 4
  const float den = __builtin_sqrtf(v) / s.bc2_sqrt + s.eps;  // 5
  p = p + (s.neg_step * m) / den;                             // 6
}

}  // namespace bucketwheel
