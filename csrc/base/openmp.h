// The OpenMP runtime that the process has loaded already, used without linking one. torch's kernels run on it.
#pragma once

namespace bucketwheel {

// Calls function(context, thread) on every thread of a team of up to `threads`: the calling thread, whose `thread` is 0,
// and those that OpenMP keeps for it. Returns after the last. Within a parallel region the team is the caller alone.
// Returns false, with nothing called, if no runtime is loaded, or if the process was forked since it loaded this library:
// a team does not survive a fork, and its parallel regions wait for ever in the child.
// `function` must not throw.
bool run_on_openmp_team(int threads, void (*function)(void* context, int thread), void* context);

}  // namespace bucketwheel
