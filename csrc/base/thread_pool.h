// The threads of the CPU kernels: loops over ranges on the caller's OpenMP team, which torch's kernels use too. The team
// spins for milliseconds after each of torch's loops: threads of our own would fight with it for the cores.
//
// The caller alone runs a loop of one range, every loop after set_num_threads(1), and every loop where the process has no
// OpenMP runtime or was forked.
#pragma once

#include <cstdint>
#include <type_traits>

namespace bucketwheel {

// How many threads a loop may use, the caller included; clamped to [1, kMaxThreads]. Running loops keep theirs.
inline constexpr int kMaxThreads = 256;
void set_num_threads(int threads);
int num_threads();

// Calls fn(begin, end) for the ranges [k * grain, min((k + 1) * grain, count)) that cover [0, count), concurrently and
// in any order. Returns after all of them. `fn` must not throw; it runs under IeeeFloats.
using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);
void parallel_for_ranges(int64_t count, int64_t grain, RangeFunction function, void* context);

template <class Function>
void parallel_for(int64_t count, int64_t grain, Function&& fn) {
  using Plain = std::remove_reference_t<Function>;
  parallel_for_ranges(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
      const_cast<std::remove_const_t<Plain>*>(&fn));
}

// The OpenMP runtime that the process has loaded already, used without linking one. torch's kernels run on it.
//
// Calls function(context, thread) on every thread of a team: the calling thread, whose `thread` is 0, and those that
// OpenMP keeps for it. Returns after the last. The team has `threads` threads or fewer, as OpenMP's limits say;
// within a parallel region usually the caller alone. `function` must not throw.
//
// Returns false, with nothing called, where no runtime was loaded at the first call, and in a process that was forked
// (and did not exec), before that call or after: a team does not survive a fork, and parallel regions wait for ever
// in the child. (So do torch's own there, once the parent had a team: such a child calls torch.set_num_threads(1), as
// DataLoader does.)
bool run_on_openmp_team(int threads, void (*function)(void* context, int thread), void* context);

}  // namespace bucketwheel
