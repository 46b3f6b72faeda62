#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/platform.h"

namespace bucketwheel {
namespace {

// Long enough to catch the next of a series of loops, short enough to be no load: waking a sleeper costs about as much.
constexpr int64_t kSpinNs = 30'000;

template <class Condition>
bool spin_until(Condition&& condition) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (condition()) {
        return true;
      }
      cpu_relax();
    }
    if (std::chrono::steady_clock::now() - start > std::chrono::nanoseconds(kSpinNs)) {
      return false;
    }
  }
}

std::atomic<int> wanted_threads{1};

// A loop in progress. Lives on its caller's stack; a helper may touch it only while `helpers` counts it.
struct Loop {
  RangeFunction function;
  void* context;
  int64_t count;
  int64_t grain;
  std::atomic<int64_t> next{0};  // first element that nobody has taken
  std::atomic<int> helpers{0};   // changed under Pool::mutex_
  Loop* following = nullptr;     // in Pool::loops_, under Pool::mutex_

  bool has_work() const { return next.load(std::memory_order_relaxed) < count; }
  void work() {
    IeeeFloats ieee;
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) {
        return;
      }
      function(context, begin, std::min(begin + grain, count));
    }
  }
};

class Pool {
 public:
  // Reads the wanted size under the lock: of several concurrent callers the last one sees the last value.
  void resize() {
    std::lock_guard lock(mutex_);
    wanted_ = wanted_threads.load() - 1;
    is_running_.resize(std::max(is_running_.size(), static_cast<size_t>(wanted_)));
    for (int index = 0; index < wanted_; ++index) {
      if (!is_running_[static_cast<size_t>(index)]) {
        std::thread([this, index] { help(index); }).detach();
        is_running_[static_cast<size_t>(index)] = true;
      }
    }
    wake_.notify_all();  // those beyond `wanted_` leave
  }

  void run(Loop& loop) {
    int sleepers;
    {
      std::lock_guard lock(mutex_);
      loop.following = loops_;
      loops_ = &loop;
      posted_.fetch_add(1, std::memory_order_release);
      sleepers = sleeping_;
    }
    const int64_t spare = (loop.count - 1) / loop.grain;
    for (int64_t i = std::min<int64_t>(sleepers, spare); i > 0; --i) {
      wake_.notify_one();
    }
    loop.work();
    {
      std::lock_guard lock(mutex_);
      Loop** link = &loops_;
      while (*link != &loop) {
        link = &(*link)->following;
      }
      *link = loop.following;  // no helper joins from here on
    }
    // A helper's last touch of `loop` is the decrement; afterwards it touches only the pool, which never dies.
    if (!spin_until([&] { return loop.helpers.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return loop.helpers.load(std::memory_order_acquire) == 0; });
    }
  }

  uint64_t generation() const { return generation_; }

 private:
  Loop* loop_with_work() const {
    Loop* loop = loops_;
    while (loop != nullptr && !loop->has_work()) {
      loop = loop->following;
    }
    return loop;
  }

  void help(int index) {
    for (;;) {
      const uint64_t seen = posted_.load(std::memory_order_acquire);
      std::unique_lock lock(mutex_);
      Loop* loop = loop_with_work();
      if (loop == nullptr && index < wanted_) {
        lock.unlock();
        if (spin_until([&] { return posted_.load(std::memory_order_acquire) != seen; })) {
          continue;
        }
        lock.lock();
        ++sleeping_;
        wake_.wait(lock, [&] { return index >= wanted_ || (loop = loop_with_work()) != nullptr; });
        --sleeping_;
      }
      if (loop == nullptr) {
        is_running_[static_cast<size_t>(index)] = false;  // a later resize() may start it again
        return;
      }
      loop->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      loop->work();
      lock.lock();
      loop->helpers.fetch_sub(1, std::memory_order_release);
      done_.notify_all();
    }
  }

  const uint64_t generation_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable wake_;  // helpers sleep here
  std::condition_variable done_;  // callers sleep here
  Loop* loops_ = nullptr;
  std::atomic<uint64_t> posted_{0};
  int wanted_ = 0;
  std::vector<bool> is_running_;  // by index: a helper that has started and not left
  int sleeping_ = 0;
};

// Never destroyed: helpers may outlive every static destructor. A forked child leaves its parent's pool alone too, whose
// helpers do not exist there and whose mutex may be locked for ever.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  while (existing == nullptr || existing->generation() != fork_generation()) {
    Pool* fresh = new Pool();
    if (current_pool.compare_exchange_strong(existing, fresh)) {
      fresh->resize();
      return *fresh;
    }
    delete fresh;  // another thread was faster: `existing` is its pool
  }
  return *existing;
}

}  // namespace

void set_num_threads(int threads) {
  threads = std::clamp(threads, 1, kMaxThreads);
  if (wanted_threads.exchange(threads) == threads) {
    return;
  }
  Pool* existing = current_pool.load();
  if (existing != nullptr && existing->generation() == fork_generation()) {
    existing->resize();
  }
}

int num_threads() { return wanted_threads.load(std::memory_order_relaxed); }

void parallel_for_ranges(int64_t count, int64_t grain, RangeFunction function, void* context) {
  if (count <= 0) {
    return;
  }
  if (count <= grain || num_threads() == 1) {
    IeeeFloats ieee;
    for (int64_t begin = 0; begin < count; begin += grain) {
      function(context, begin, std::min(begin + grain, count));
    }
    return;
  }
  Loop loop{function, context, count, grain};
  pool().run(loop);
}

}  // namespace bucketwheel
