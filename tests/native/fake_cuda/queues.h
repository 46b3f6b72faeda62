// Streams as queues instead of threads, and events as vector clocks: what a test that looks for races runs on.
//
// [Note: checked streams] From begin_check() to end_check() nothing runs but inside calls of the runtime: after what a call
// enqueues, and before an event is queried, random pieces of work of random streams run, each behind what it has to be
// behind. Nothing else is in order, and work is as late as the seed wants it; one thread that makes the same calls gets
// the same order for the same seed. Every piece says which bytes it reads and writes, and races.h finds the pairs that
// nothing orders. What orders two pieces:
//
//   the stream they are in                 the host that waited for the first, or saw it done, and enqueued the second
//   a recorded event that a stream waits for, whether it is done or not
//
// The host is one actor: its threads are taken to be in the order of their calls, which ThreadSanitizer checks. A thread's
// default stream is a stream of its own here, whose work is done when the call returns, while the host does not know it.
// Work that runs inside of CUDA graphs is not checked.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "capture.h"
#include "races.h"

namespace fake_cuda {

struct Queue;

// What an event stands for: one for each cudaEventRecord, so that waiters keep theirs when the event is recorded again.
struct Mark {
  std::atomic<bool> is_done{false};
  CapturePoint captured;
  std::chrono::steady_clock::time_point time;
  // Of a checked stream: the number of the check, outside of which the clock means nothing; where it is recorded, until it is
  // done; and what is over when it is.
  uint64_t check = 0;
  Queue* queue = nullptr;
  Clock clock;

  void complete() {
    time = std::chrono::steady_clock::now();
    is_done = true;
    is_done.notify_all();
  }
  bool query() const { return is_done; }
  void wait() const { is_done.wait(false); }
};
using MarkRef = std::shared_ptr<Mark>;

// What tests call, while all streams are idle. `dropped`: the number of the wait that is forgotten (1: the first; 0: none)
// of those of streams and, with cudaEventSynchronize, of the host.
void begin_check(uint64_t seed, uint64_t dropped = 0);
struct Checked {
  std::vector<std::string> races;  // one line for each pair of places
  uint64_t waits = 0;
  bool is_implied = false;  // the next work behind the dropped wait came behind what it was for all the same
};
Checked end_check();
// The place in the code that messages give to what this thread enqueues from now on.
void set_place(std::string place);
// The work that runs accesses these bytes; `what` is for messages and lives for ever. Ignored outside of a check.
void access(const void* data, size_t size_bytes, bool writes, const char* what);
// So does the host, now.
void access_on_host(const void* data, size_t size_bytes, bool writes, const char* what);

// What the runtime calls in a check.
bool is_checked();
void push_work(cudaStream_t stream, Task task);
void push_record(cudaStream_t stream, const MarkRef& mark);
void push_wait(cudaStream_t stream, const MarkRef& mark);
bool query(Mark& mark);
void synchronize(const MarkRef& mark);
void synchronize(cudaStream_t stream);
void synchronize_device();
void remove_queue(cudaStream_t stream);
void forget(const void* data, size_t size_bytes);

}  // namespace fake_cuda
