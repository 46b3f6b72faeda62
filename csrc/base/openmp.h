// The OpenMP runtime that the process has loaded already, used without linking one. torch's kernels run on it.
#pragma once

namespace bucketwheel {

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
