// HostQueue: the ordered queue behind a CPU stream, its worker, and how waiting threads help it along.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/fork.h"
#include "device/event.h"

namespace bucketwheel {

// One entry: a task to run, or an event to wait for.
struct Work {
  std::function<void()> task;
  EventRef gate;
};

// [Note: waiters help]
// The holder of the queue's *runner role* runs its entries, in order, one at a time. Who takes the role, if it is
// free:
//   the worker thread                        when there is work
//   a thread that waits without a deadline   it runs entries until its ticket is done, then hands the role back and
//                                            wakes the worker if work is left. So `stream.run(task);
//                                            event.synchronize()` costs a queue operation, not two thread switches
//   a thread with a deadline                 never: it could not stop in time
// Where tasks call Python the worker alone takes it (RunBy::kWorker): on the main thread a task could run signal
// handlers, whose exception belongs to the waiting caller and not to the task. A waiting thread that does not get the
// role sleeps until its ticket is done.
//
// This cannot deadlock where plain worker threads would not. An entry waits only for events that were recorded before
// it was enqueued, so waits form no cycle, and a helper runs only entries that its ticket waits for. A task that waits
// for later entries of its own queue would wait for itself; that is detected and thrown.
class HostQueue {
 public:
  // Whose threads run entries. kCaller: no worker; push() runs the entry.
  enum class RunBy : uint8_t { kCaller, kWorker, kWorkerOrWaiter };

  HostQueue(std::string name, RunBy run_by, uint64_t fuzz_seed);
  ~HostQueue();

  // Starts the worker, which keeps the queue alive until the queue is closed and empty. DeviceError when the system
  // gives no thread.
  static void start_worker(const std::shared_ptr<HostQueue>& queue);

  // Enqueues and returns the ticket of the entry: 1, 2, 3, ...
  uint64_t push(Work work);
  // The ticket of the last entry, 0 if there was none.
  uint64_t last_ticket() const { return enqueued_.load(std::memory_order_acquire); }
  // DeviceError when the queue is closed or belongs to a parent process.
  void expect_open() const;
  bool is_done(uint64_t ticket) const { return done_.load(std::memory_order_acquire) >= ticket; }
  // Blocks until the ticket is done; false when the deadline passed first.
  bool wait_for(uint64_t ticket, const Deadline& deadline);

  // No more pushes. Waits for the worker to drain the queue and end, except inside a task.
  void close() noexcept;

  // DeviceError in a forked child of the process that made the queue.
  void expect_same_process() const;
  const std::string& name() const { return name_; }

 private:
  void work() noexcept;
  void run_until(uint64_t ticket, std::unique_lock<std::mutex>& lock) noexcept;
  void execute(Work work) noexcept;
  bool is_foreign() const noexcept { return process_.is_foreign(); }
  bool is_inside() const;
  bool linger(std::unique_lock<std::mutex>& lock) noexcept;
  void pause_at_random() noexcept;

  const std::string name_;
  const RunBy run_by_;
  const MadeIn process_;
  uint64_t fuzz_state_;  // 0: off. Touched by the runner only.

  std::atomic<uint64_t> done_{0};      // tickets done, in order; written by the runner
  std::atomic<uint64_t> enqueued_{0};  // written under mutex_
  std::atomic<bool> is_closed_{false};

  std::mutex mutex_;
  // By pointer: a forked child leaks it, since it may have been half changed at the fork.
  std::deque<Work>* entries_;
  bool has_runner_ = false;
  uint64_t wanted_ticket_;                     // the lowest ticket a sleeper waits for
  std::atomic<uint32_t> progress_{0};          // sleepers' futex; moves when wanted_ticket_ is done
  std::atomic<uint32_t> is_worker_asleep_{0};  // the worker's futex; written under mutex_
  std::thread* worker_ = nullptr;              // by pointer: leaked in a forked child
};

}  // namespace bucketwheel
