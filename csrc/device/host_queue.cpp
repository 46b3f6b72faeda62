#include "device/host_queue.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <limits>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/futex.h"

namespace bucketwheel {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

// How long an idle worker stays awake before it sleeps: about the cost of going to sleep and waking up. It yields
// meanwhile, because the thread that it waits for may need its core.
constexpr std::chrono::microseconds kSpin{20};

// The queues whose entries this thread is running, innermost first.
struct Frame {
  const HostQueue* queue;
  const Frame* outer;
};
thread_local const Frame* running = nullptr;

// Signals go to the threads of the program: Python handles them on its main thread. Faults stay with the thread that
// causes them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) {
      sigdelset(&all, fault);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

HostQueue::HostQueue(std::string name, RunBy run_by, uint64_t fuzz_seed)
    : name_(std::move(name)),
      run_by_(run_by),
      fuzz_state_(fuzz_seed),
      entries_(new std::deque<Work>()),
      wanted_ticket_(kNever) {}

HostQueue::~HostQueue() {
  if (is_foreign()) {
    return;  // leaked: what tasks own may take locks that are held for ever in this process
  }
  delete worker_;
  delete entries_;
}

void HostQueue::start_worker(const std::shared_ptr<HostQueue>& queue) {
  if (queue->run_by_ == RunBy::kCaller) {
    return;
  }
  SignalsBlocked blocked;  // inherited by the worker
  try {
    queue->worker_ = new std::thread([queue] { queue->work(); });
  } catch (const std::system_error& error) {
    throw DeviceError("stream '" + queue->name_ + "': the system started no thread: " + error.what() +
                      " (raise 'ulimit -u' or the container's pids limit)");
  }
  pthread_setname_np(queue->worker_->native_handle(), queue->name_.substr(0, 15).c_str());
}

void HostQueue::expect_same_process() const {
  if (is_foreign()) {
    throw DeviceError(
        "stream '" + name_ +
        "' belongs to the parent process: its worker thread did not survive fork(). Make new streams, pools "
        "and communicators in the child, or start it with the 'spawn' method");
  }
}

void HostQueue::expect_open() const {
  expect_same_process();
  if (is_closed_.load(std::memory_order_relaxed)) {
    throw DeviceError("stream '" + name_ + "' is closed");
  }
}

// Whether the calling thread runs a task of this queue.
bool HostQueue::is_inside() const {
  const Frame* frame = running;
  while (frame != nullptr && frame->queue != this) {
    frame = frame->outer;
  }
  return frame != nullptr;
}

uint64_t HostQueue::push(Work work) {
  expect_open();
  bool must_wake = false;
  uint64_t ticket;
  {
    std::lock_guard lock(mutex_);
    if (is_closed_.load(std::memory_order_relaxed)) {
      throw DeviceError("stream '" + name_ + "' is closed");
    }
    entries_->push_back(std::move(work));
    ticket = enqueued_.load(std::memory_order_relaxed) + 1;
    enqueued_.store(ticket, std::memory_order_release);
    if (!has_runner_ && is_worker_asleep_.load(std::memory_order_relaxed) != 0) {
      is_worker_asleep_.store(0, std::memory_order_relaxed);
      must_wake = true;
    }
  }
  if (must_wake) {
    futex_wake(is_worker_asleep_, 1);
  }
  if (run_by_ == RunBy::kCaller && !is_inside()) {  // else it runs when the task that pushed it is over
    wait_for(ticket, {});
  }
  return ticket;
}

bool HostQueue::wait_for(uint64_t ticket, const Deadline& deadline) {
  if (is_done(ticket)) {
    return true;
  }
  expect_same_process();
  if (is_inside()) {
    throw DeviceError("a task of stream '" + name_ + "' waits for work queued behind itself");
  }
  for (;;) {
    uint32_t progress = 0;
    {
      std::unique_lock lock(mutex_);
      if (is_done(ticket)) {
        return true;
      }
      if (!has_runner_ && (run_by_ == RunBy::kCaller || (run_by_ == RunBy::kWorkerOrWaiter && !deadline))) {
        run_until(ticket, lock);
        continue;
      }
      wanted_ticket_ = std::min(wanted_ticket_, ticket);
      progress = progress_.load(std::memory_order_relaxed);
    }
    if (!futex_wait(progress_, progress, deadline) && !is_done(ticket)) {
      return false;
    }
  }
}

// Called with the lock held and the role free; returns with the lock held and the role free.
void HostQueue::run_until(uint64_t ticket, std::unique_lock<std::mutex>& lock) noexcept {
  has_runner_ = true;
  const Frame frame{this, running};
  running = &frame;
  while (!entries_->empty() && !is_done(ticket)) {
    Work work = std::move(entries_->front());
    entries_->pop_front();
    lock.unlock();
    execute(std::move(work));
    const uint64_t done = done_.load(std::memory_order_relaxed) + 1;
    done_.store(done, std::memory_order_release);
    lock.lock();
    // A sleeper registers under the lock after it saw its ticket not done, so it is either seen here or has seen
    // `done`.
    if (done >= wanted_ticket_) {
      wanted_ticket_ = kNever;  // sleepers with later tickets register again
      progress_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      futex_wake_all(progress_);
      lock.lock();
    }
  }
  running = frame.outer;
  has_runner_ = false;
  // Work that came while this thread had the role woke nobody.
  if (!entries_->empty() && is_worker_asleep_.load(std::memory_order_relaxed) != 0) {
    is_worker_asleep_.store(0, std::memory_order_relaxed);
    lock.unlock();
    futex_wake(is_worker_asleep_, 1);
    lock.lock();
  }
}

// By value: what the work owns is freed when the work is done, without the lock.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
void HostQueue::execute(Work work) noexcept {
  if (fuzz_state_ != 0) {
    pause_at_random();
  }
  if (work.gate) {
    work.gate->synchronize();
  } else {
    work.task();
  }
}

void HostQueue::work() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!has_runner_ && !entries_->empty()) {
      run_until(kNever, lock);
      continue;
    }
    if (is_closed_.load(std::memory_order_relaxed) && !has_runner_) {
      return;
    }
    if (linger(lock)) {
      continue;
    }
    is_worker_asleep_.store(1, std::memory_order_relaxed);
    lock.unlock();
    futex_wait(is_worker_asleep_, 1);
    lock.lock();
  }
}

// Spins for a while; returns whether work has come. A call that finds the worker awake does not pay for waking it. The
// lock is held on entry and on return, but not in between.
bool HostQueue::linger(std::unique_lock<std::mutex>& lock) noexcept {
  const auto until = Clock::now() + kSpin;
  bool has_work = false;
  while (!has_work && Clock::now() < until) {
    const uint64_t known = enqueued_.load(std::memory_order_relaxed);
    lock.unlock();
    for (int i = 0; i < 4 && enqueued_.load(std::memory_order_acquire) == known; ++i) {
      std::this_thread::yield();
    }
    lock.lock();
    has_work = (!entries_->empty() && !has_runner_) || is_closed_.load(std::memory_order_relaxed);
  }
  return has_work;
}

void HostQueue::close() noexcept {
  if (is_foreign()) {
    return;
  }
  std::thread* worker;
  {
    std::lock_guard lock(mutex_);
    is_closed_.store(true, std::memory_order_relaxed);
    is_worker_asleep_.store(0, std::memory_order_relaxed);
    worker = std::exchange(worker_, nullptr);
  }
  if (worker == nullptr) {
    return;
  }
  futex_wake(is_worker_asleep_, 1);
  // Inside a task of any stream the worker might have to wait for that very task.
  if (running != nullptr || worker->get_id() == std::this_thread::get_id()) {
    worker->detach();
  } else {
    worker->join();
  }
  delete worker;
}

void HostQueue::pause_at_random() noexcept {
  // splitmix64
  fuzz_state_ += 0x9E3779B97F4A7C15u;
  uint64_t bits = fuzz_state_;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits ^= bits >> 31;
  switch (bits & 3) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds((bits >> 2) % 300));
      break;
    case 1:
      std::this_thread::yield();
      break;
    default:
      break;
  }
}

}  // namespace bucketwheel
