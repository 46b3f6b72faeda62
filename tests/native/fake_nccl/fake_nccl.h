// A libnccl for tests: NCCL's symbols over host memory, ranks that are threads or processes of one host, and a script.
//
// [Note: fake NCCL]
// What it keeps of the real one: the results (sums in fixed rank order, accumulated in fp32 and rounded once, which are
// the bits of our shm backend), the arguments that are refused, the order of operations within a communicator and the
// independence of two of them, groups, and that a call or an operation can wait for peers for as long as it likes. What
// it does not: speed, memory of a device, anything of CUDA but the order of a stream. Two things it does that NCCL does
// not promise: ranks that call different things get an error instead of a hang, and use after destruction is refused.
//
// Device work runs through the function given to fake_nccl_set_launch(), without one in the calling thread. It ends
// early when its communicator is aborted; every other wait for a peer has no end, as in NCCL. FAKE_NCCL_VERSION of the
// environment is what ncclGetVersion says, else 2.30.7.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Puts `function(argument)` at the end of a stream; 0 or an error. And whether the stream is being captured: then what
// is launched may run any number of times, later. Both for the process; null: the calling thread, never captured.
void fake_nccl_set_launch(int (*launch)(void* stream, void (*function)(void*), void* argument),
                          int (*is_capturing)(void* stream));

// The countdown-th of the next calls (1: the next) of "ncclAllGather" ... returns `result` and is not made. A group that
// fails to end is closed, and nothing of it is done.
void fake_nccl_fail(const char* function, uint64_t countdown, int result);
// The work of the countdown-th next operation never completes until its communicator is aborted.
void fake_nccl_hang(uint64_t countdown);
// The next call of `function` blocks the host until fake_nccl_release(), or until one of its communicators is aborted.
void fake_nccl_hang_call(const char* function);
// Also ends, with an error, a blocking initialisation that waits for ranks: NCCL's would wait for ever.
void fake_nccl_release();
uint64_t fake_nccl_hanging_calls();  // blocked now
// What ncclCommGetAsyncError says of all communicators of the process from now on; 0: the truth.
void fake_nccl_async_error(int code);
// ncclCommWindowRegister succeeds with a null window, as where windows are not supported.
void fake_nccl_null_windows(int are_null);

// Not 0: operations are checked and counted as ever, and nothing is launched, so that what a call costs is the caller's
// and little else. Not while operations are in flight.
void fake_nccl_count_only(int counts_only);

uint64_t fake_nccl_calls(const char* function);  // since the last reset
uint64_t fake_nccl_live_comms();                 // with those that a call is about to make
uint64_t fake_nccl_open_groups();
uint64_t fake_nccl_live_windows();
uint64_t fake_nccl_live_bytes();      // of ncclMemAlloc
uint64_t fake_nccl_max_concurrent();  // communicators whose work was in progress at one time, at most
// A member of the configuration that the last communicator was made with ("max_ctas", "cta_policy", "split_share",
// "blocking"); INT_MIN where it was not set.
int fake_nccl_last_config(const char* member);
// Ends the script: nothing fails, hangs or counts from here. What is alive stays.
void fake_nccl_reset();
}
