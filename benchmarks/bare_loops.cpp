// The limit for a sharded AdamW step of two ranks: the bytes that must move, moved by plain loops.
//
//   1. pack    every gradient is copied into this rank's flat buffer in shared memory
//   2. sum     this rank's half of both flat buffers is added, in place, with the sum of squares on the way
//   3. norm    the ranks exchange their sums of squares; coefficient = min(1, max_norm / (norm + 1e-6))
//   4. Adam    AdamW with decoupled weight decay on this rank's half (formula of torch.optim.AdamW)
//   5. copy    the new half is copied into the peer's parameters, block by block while it is still in the cache
//
// bare_step_parts is for sharded parameters (ZeRO-3): this rank owns a part of every unit. There is no step 5: the
// benchmark copies the peer's part of a unit before its forward, and again before its backward.
//
// Compiled by the benchmark for the machine at hand (-O3 -march=native) and called through ctypes. fp32 only, no
// tails to peel (the caller pads to 16 floats), no checks: this is what the optimizer is compared with, not something
// to train with.
#include <sched.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 16;    // one AVX-512 vector of float
constexpr int64_t kBlock = 8192;  // floats: four streams of 32 KiB stay in a core's L2
constexpr int kSpinsBeforeYield = 4096;

// Shared by both ranks, zero-filled at the start.
struct Control {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> generation;
  alignas(64) double sum_squares[2];
};

struct AdamScalars {
  float lr, beta1, beta2, eps, weight_decay;
  float correction1, correction2_sqrt;  // 1 - beta1^t, sqrt(1 - beta2^t)
  float grad_factor;                    // 1 / world times the clip coefficient
};

void wait_for_both(Control* control) {
  const uint32_t generation = control->generation.load(std::memory_order_acquire);
  if (control->arrived.fetch_add(1, std::memory_order_acq_rel) == 1) {
    control->arrived.store(0, std::memory_order_relaxed);
    control->generation.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; control->generation.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins > kSpinsBeforeYield) sched_yield();
  }
}

// sum of squares of one block in float lanes, over blocks in double
double sum_squares(const float* __restrict values, int64_t numel) {
  double total = 0;
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t stop = std::min(numel, start + kBlock);
    float lanes[4 * kLanes] = {};
    int64_t i = start;
    for (; i + 4 * kLanes <= stop; i += 4 * kLanes) {
      for (int64_t lane = 0; lane < 4 * kLanes; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
    }
    for (; i < stop; ++i) lanes[i % (4 * kLanes)] += values[i] * values[i];
    for (float lane : lanes) total += lane;
  }
  return total;
}

// Step 2 for one range: `own` += `peer`. Returns the sum of squares of the result.
double add_peer(float* own, const float* peer, int64_t numel) {
  double squares = 0;
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t count = std::min(kBlock, numel - start);
    float* __restrict a = own + start;
    const float* __restrict b = peer + start;
    for (int64_t i = 0; i < count; ++i) a[i] += b[i];
    squares += sum_squares(a, count);
  }
  return squares;
}

// Step 3. `squares`: of this rank; `norm`: of the averaged gradients of both.
AdamScalars clipped(Control* control, int rank, double squares, const AdamScalars& scalars, double max_norm,
                    double* norm) {
  control->sum_squares[rank] = squares;
  wait_for_both(control);
  *norm = std::sqrt(control->sum_squares[0] + control->sum_squares[1]) * scalars.grad_factor;
  AdamScalars found = scalars;
  found.grad_factor *= static_cast<float>(std::min(1.0, max_norm / (*norm + 1e-6)));
  return found;
}

void adam(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict g, int64_t numel,
          const AdamScalars& s) {
  const float decay = 1 - s.lr * s.weight_decay, step = s.lr / s.correction1;
  const float keep1 = 1 - s.beta1, keep2 = 1 - s.beta2;
  for (int64_t i = 0; i < numel; ++i) {
    const float grad = g[i] * s.grad_factor;
    m[i] += keep1 * (grad - m[i]);
    v[i] = s.beta2 * v[i] + keep2 * grad * grad;
    p[i] = p[i] * decay - step * m[i] / (std::sqrt(v[i]) / s.correction2_sqrt + s.eps);
  }
}

}  // namespace

extern "C" {

void bare_pack(float* flat, const float* const* sources, const int64_t* numels, int64_t count) {
  for (int64_t i = 0; i < count; flat += numels[i], ++i) std::memcpy(flat, sources[i], numels[i] * sizeof(float));
}

double bare_sum_squares(const float* values, int64_t numel) { return sum_squares(values, numel); }

// One process, one flat tensor: the in-place sweep alone.
void bare_adam(float* p, float* m, float* v, const float* g, int64_t numel, const AdamScalars* scalars) {
  adam(p, m, v, g, numel, *scalars);
}

// Steps 2 to 5 for one of two ranks, after bare_pack. All pointers are to this rank's half of `numel` floats: `own`
// and `peer` of the flat gradient buffers (the sum is left in `own`), `p` of this rank's parameters, `peer_p` of the
// peer's. scalars->grad_factor comes in as 1 / world. Returns the norm of the averaged gradients.
double bare_exchange_and_step(void* control_page, int rank, float* own, const float* peer, float* p, float* peer_p,
                              float* m, float* v, int64_t numel, const AdamScalars* scalars, double max_norm) {
  auto* control = static_cast<Control*>(control_page);
  wait_for_both(control);  // both flat buffers are packed, and no backward reads the parameters any more
  double norm = 0;
  const double squares = add_peer(own, peer, numel);
  const AdamScalars with_clip = clipped(control, rank, squares, *scalars, max_norm, &norm);
  for (int64_t start = 0; start < numel; start += kBlock) {
    const int64_t count = std::min(kBlock, numel - start);
    adam(p + start, m + start, v + start, own + start, count, with_clip);
    std::memcpy(peer_p + start, p + start, count * sizeof(float));
  }
  wait_for_both(control);  // the peer's half has arrived in this rank's parameters
  return norm;
}

// Steps 2 to 4 for `count` parts of the flat buffers, which begin at `begins` and have `numels` floats: those that this
// rank owns. `m` and `v` have the parts one behind the other. When it returns the peer's parts may be copied.
double bare_step_parts(void* control_page, int rank, float* grads, const float* peer_grads, float* params, float* m,
                       float* v, const int64_t* begins, const int64_t* numels, int64_t count,
                       const AdamScalars* scalars, double max_norm) {
  auto* control = static_cast<Control*>(control_page);
  wait_for_both(control);  // both flat buffers are packed, and the peer reads no parameters of this rank any more
  double squares = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) squares += add_peer(grads + begins[i], peer_grads + begins[i], numels[i]);
  const AdamScalars with_clip = clipped(control, rank, squares, *scalars, max_norm, &norm);
  for (int64_t i = 0; i < count; m += numels[i], v += numels[i], ++i) {
    adam(params + begins[i], m, v, grads + begins[i], numels[i], with_clip);
  }
  wait_for_both(control);
  return norm;
}

}  // extern "C"
