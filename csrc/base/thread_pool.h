// The threads of the CPU kernels: loops over ranges on the caller and a few more.
//
//   which threads run a loop
//   one range, or set_num_threads(1)           the caller alone, without a lock
//   the caller has called use_openmp_team()    its OpenMP team. torch's kernels use this team too, and
//                                              it spins for milliseconds after each of them: helpers of ours would
//                                              fight with it for the cores
//   else, or where the process has no team     the caller and helpers of one pool
//
// The pool may be called from several threads at once. Each caller works on its own loop; helpers join any loop that
// has ranges left, so a caller never waits for a free helper. Idle helpers spin for at most kSpin, then sleep. A
// forked child starts with a new pool of the same size.
#pragma once

#include <cstdint>
#include <type_traits>

namespace bucketwheel {

// How many threads a loop may use, the caller included; clamped to [1, kMaxThreads]. Running loops keep theirs.
inline constexpr int kMaxThreads = 256;
void set_num_threads(int threads);
int num_threads();

// From now on the calling thread's loops run on its OpenMP team, if the process has an OpenMP runtime. For threads
// that compute with torch.
void use_openmp_team();

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
