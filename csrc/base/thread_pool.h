// Thread pool of the CPU kernels: loops over ranges on the caller and a few helpers.
//
// One pool per process, sized by set_num_threads() (Python passes torch.get_num_threads()). Callable from several host
// threads at once: each caller works on its own loop, and helpers join whatever loop has ranges left, so a caller never
// waits for a free helper. With one thread, or one range, the loop runs inline and touches no lock. Idle helpers spin
// for at most kSpinNs, then sleep. A forked child starts with a fresh pool of the same size.
#pragma once

#include <cstdint>
#include <type_traits>

namespace bucketwheel {

// Threads that a loop may use, the caller included; clamped to [1, kMaxThreads]. Loops already running keep theirs.
inline constexpr int kMaxThreads = 256;
void set_num_threads(int threads);
int num_threads();

// Calls fn(begin, end) for the ranges [k * grain, min((k + 1) * grain, count)) that cover [0, count), in any order and
// at the same time. Returns after all of them. `fn` must not throw. It runs under IeeeFloats.
using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);
void parallel_for_ranges(int64_t count, int64_t grain, RangeFunction function, void* context);

template <class Function>
void parallel_for(int64_t count, int64_t grain, Function&& fn) {
  using Plain = std::remove_reference_t<Function>;
  parallel_for_ranges(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
      const_cast<std::remove_const_t<Plain>*>(&fn));
}

}  // namespace bucketwheel
