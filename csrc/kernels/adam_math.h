// Adam, one element and one set of scalars: the only place where the formula is written. CPU and CUDA kernels include
// it and must agree bitwise, so every operation is IEEE-rounded (compile with -ffp-contract=off, -fmad=false), every
// fma is explicit, and the order below is part of the contract.
//
// Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (AdamW), Algorithm 2; L2 mode is Kingma & Ba, "Adam",
// Algorithm 1 with wd * p added to the gradient; amsgrad is Reddi, Kale & Kumar, "On the Convergence of Adam and
// Beyond", Algorithm 2. For step t (from 1), in this order:
//   1.  g = g * gscale                          gscale = 1 / (world * loss_scale) * clip coefficient; < 0: maximize
//   2.  p = p * (1 - lr * wd)                   decoupled     or     g = fma(p, wd, g)     L2
//   3.  m = fma(1 - b1, g - m, m)
//   4.  v = fma((1 - b2) * g, g, v * b2)
//   5.  den = sqrt(v) / sqrt(1 - b2^t) + eps    amsgrad: x = max(x, v), a NaN stays, and sqrt(x) for sqrt(v)
//   6.  p = p + (-lr / (1 - b1^t) * m) / den
// in float32, or in float64 where the parameter is. Each coefficient is computed in double and rounded once: 1 - b2 in
// float would bias v by 1.3e-5 relative at b2 = 0.999.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

// The hyper-parameters of a group.
struct AdamGroup {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

// The scalars of one step, constant over a row. T: float, or double for float64 parameters.
template <class T>
struct AdamScalarsOf {
  T gscale;
  T decay;  // 1 - lr * wd, or wd in L2 mode
  T one_minus_b1;
  T b2;
  T one_minus_b2;
  T bc2_sqrt;      // sqrt(1 - b2^t)
  T inv_bc2_sqrt;  // 1 / bc2_sqrt: of the rounded one
  T eps;
  T neg_step;  // -lr / (1 - b1^t)

  template <class U>
  BW_HD AdamScalarsOf<U> rounded() const {
    AdamScalarsOf<U> out;
    out.gscale = static_cast<U>(gscale);
    out.decay = static_cast<U>(decay);
    out.one_minus_b1 = static_cast<U>(one_minus_b1);
    out.b2 = static_cast<U>(b2);
    out.one_minus_b2 = static_cast<U>(one_minus_b2);
    out.bc2_sqrt = static_cast<U>(bc2_sqrt);
    out.inv_bc2_sqrt = U{1} / out.bc2_sqrt;
    out.eps = static_cast<U>(eps);
    out.neg_step = static_cast<U>(neg_step);
    return out;
  }
};
using AdamScalars = AdamScalarsOf<float>;

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
BW_HD AdamScalarsOf<double> adam_scalars(const AdamGroup& group, int64_t step, double gscale, bool decoupled,
                                         bool maximize) {
  const double bias_correction1 = 1.0 - pow_int(group.beta1, step);
  const double bias_correction2 = 1.0 - pow_int(group.beta2, step);
  AdamScalarsOf<double> out;
  out.gscale = maximize ? -gscale : gscale;
  out.decay = decoupled ? 1.0 - group.lr * group.weight_decay : group.weight_decay;
  out.one_minus_b1 = 1.0 - group.beta1;
  out.b2 = group.beta2;
  out.one_minus_b2 = 1.0 - group.beta2;
  out.bc2_sqrt = __builtin_sqrt(bias_correction2);
  out.inv_bc2_sqrt = 1.0 / out.bc2_sqrt;
  out.eps = group.eps;
  out.neg_step = -(group.lr / bias_correction1);
  return out;
}

BW_HD float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
BW_HD double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
BW_HD float square_root(float x) { return __builtin_sqrtf(x); }
BW_HD double square_root(double x) { return __builtin_sqrt(x); }

// The bits of x / divisor, faster, from the known 1 / divisor: a multiplication and one correction by the remainder,
// which an fma computes exactly (Markstein, "Computation of elementary functions on the IBM RISC System/6000
// processor", 1990). Correct if neither the quotient nor the remainder underflows. A division would take as long as
// the rest of the formula.
BW_HD float quotient(float x, float divisor, float inverse) {
  const float guess = x * inverse;
  const float remainder = __builtin_fmaf(-guess, divisor, x);
  const float corrected = __builtin_fmaf(remainder, inverse, guess);
  return remainder == remainder ? corrected : guess;  // infinite or NaN as it is
}
BW_HD double quotient(double x, double divisor, double) { return x / divisor; }

// The moments: steps 1 to 4, without the decay of p.
template <class T>
BW_HD void adam_moments(T p, T g, T& m, T& v, const AdamScalarsOf<T>& s, bool decoupled) {
  g = g * s.gscale;  // 1
  if (!decoupled) {
    g = fused_multiply_add(p, s.decay, g);  // 2
  }
  m = fused_multiply_add(s.one_minus_b1, g - m, m);         // 3
  v = fused_multiply_add(s.one_minus_b2 * g, g, v * s.b2);  // 4
}

// The weight after the step. `v`: of this step, or its maximum (amsgrad).
template <class T>
BW_HD T adam_weight(T p, T m, T v, const AdamScalarsOf<T>& s, bool decoupled) {
  if (decoupled) {
    p = p * s.decay;  // 2
  }
  const T den = quotient(square_root(v), s.bc2_sqrt, s.inv_bc2_sqrt) + s.eps;  // 5
  return p + (s.neg_step * m) / den;                                           // 6
}

// `vmax`: amsgrad's running maximum of v, updated from v before v is rounded to bfloat16; null: no amsgrad.
template <class T>
BW_HD void adam_element(T& p, T g, T& m, T& v, T* vmax, const AdamScalarsOf<T>& s, bool decoupled) {
  adam_moments(p, g, m, v, s, decoupled);
  if (vmax != nullptr) {
    *vmax = v > *vmax || v != v ? v : *vmax;  // 5 NOLINT(misc-redundant-expression): NaN
  }
  p = adam_weight(p, m, vmax != nullptr ? *vmax : v, s, decoupled);
}

}  // namespace bucketwheel
