#include "base/thread_pool.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
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

template <class Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// What `#pragma omp parallel` compiles to. GNU's, LLVM's and Intel's runtimes all have it.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
  int (*thread_num)();
  bool was_forked;  // by the first call; forks from there on are counted

  OpenMp()
      : parallel(find<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")),
        thread_num(find<int()>("omp_get_thread_num")),
        was_forked(fork_generation() != 0 || is_forked_without_exec()) {}

  bool has_team() const {
    return parallel != nullptr && thread_num != nullptr && !was_forked && fork_generation() == 0;
  }
};

struct Call {
  void (*function)(void* context, int thread);
  void* context;
  int (*thread_num)();
};

}  // namespace

bool run_on_openmp_team(int threads, void (*function)(void* context, int thread), void* context) {
  static const OpenMp openmp;
  if (!openmp.has_team()) {
    return false;
  }
  Call call = {function, context, openmp.thread_num};
  openmp.parallel(
      [](void* data) {
        const Call& of = *static_cast<const Call*>(data);
        of.function(of.context, of.thread_num());
      },
      &call, static_cast<unsigned>(threads), 0);
  return true;
}

namespace {

// How long a thread looks for the next event before it sleeps. Waking a sleeper can take longer than a small loop;
// with a cold cache the Python code between two optimizer steps takes half as long as this.
constexpr auto kSpin = std::chrono::microseconds(60);

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
    if (std::chrono::steady_clock::now() - start > kSpin) {
      return false;
    }
  }
}

std::atomic<int> wanted_threads{1};
thread_local bool has_openmp_team = false;

// A loop in progress. Lives on its caller's stack; a helper may touch it only while `helpers` counts it.
//
// Each thread has a *home*, an equal part of the ranges (with more than kMaxHomes threads several share one). It takes
// those first, in order, then what is left in other homes. So repeated loops find their memory in the cache of the
// same core, and the others take over the part of a thread that comes late.
class Loop {
 public:
  Loop(int64_t count, int64_t grain, RangeFunction function, void* context)
      : count_(count), grain_(grain), function_(function), context_(context) {
    const int64_t ranges = (count - 1) / grain + 1;
    const int64_t threads = std::min<int64_t>(ranges, num_threads());
    spare_ = static_cast<int>(threads) - 1;
    homes_ = static_cast<int>(std::min(threads, kMaxHomes));
    for (int64_t h = 0; h < homes_; ++h) {
      home_[h].next.store(ranges * h / homes_, std::memory_order_relaxed);
      home_[h].end = ranges * (h + 1) / homes_;
    }
  }

  // How many threads besides the caller can have a range each.
  int spare() const { return spare_; }
  bool has_work() const {
    return std::any_of(home_.begin(), home_.begin() + homes_, [](const Home& home) { return home.has_work(); });
  }
  // `thread`: 0 for the caller.
  void work(int thread) {
    IeeeFloats ieee;
    for (int h = 0; h < homes_; ++h) {
      Home& home = home_[static_cast<size_t>((thread + h) % homes_)];
      while (home.has_work()) {
        const int64_t range = home.next.fetch_add(1, std::memory_order_relaxed);
        if (range < home.end) {
          function_(context_, range * grain_, range == (count_ - 1) / grain_ ? count_ : (range + 1) * grain_);
        }
      }
    }
  }

  std::atomic<int> helpers{0};  // changed under ThreadPool::mutex_
  Loop* following = nullptr;    // in ThreadPool::loops_, under ThreadPool::mutex_

 private:
  static constexpr int64_t kMaxHomes = 64;
  struct alignas(64) Home {
    std::atomic<int64_t> next;  // first range that nobody has taken
    int64_t end;

    bool has_work() const { return next.load(std::memory_order_relaxed) < end; }
  };

  int64_t count_;
  int64_t grain_;
  RangeFunction function_;
  void* context_;
  int spare_;
  int homes_;
  std::array<Home, kMaxHomes> home_;
};

class ThreadPool {
 public:
  // Of several concurrent callers the last one sees the last value. Before the first loop there are no helpers.
  void resize() {
    std::lock_guard lock(mutex_);
    if (is_started_) {
      start();
    }
  }

  void run(Loop& loop) {
    int sleepers;
    {
      std::lock_guard lock(mutex_);
      if (!is_started_) {
        start();
      }
      loop.following = loops_;
      loops_ = &loop;
      posted_.fetch_add(1, std::memory_order_release);
      sleepers = sleeping_;
    }
    for (int i = std::min(sleepers, loop.spare()); i > 0; --i) {
      wake_.notify_one();
    }
    loop.work(0);
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

 private:
  // With the lock held.
  void start() {
    is_started_ = true;
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
      loop->work(index + 1);
      lock.lock();
      loop->helpers.fetch_sub(1, std::memory_order_release);
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  bool is_started_ = false;
  std::condition_variable wake_;  // helpers sleep here
  std::condition_variable done_;  // callers sleep here
  Loop* loops_ = nullptr;
  std::atomic<uint64_t> posted_{0};
  int wanted_ = 0;
  std::vector<bool> is_running_;  // by index: a helper that has started and not left
  int sleeping_ = 0;
};

}  // namespace

void set_num_threads(int threads) {
  threads = std::clamp(threads, 1, kMaxThreads);
  if (wanted_threads.exchange(threads) == threads) {
    return;
  }
  per_process<ThreadPool>().resize();
}

void use_openmp_team() { has_openmp_team = true; }

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
  Loop loop(count, grain, function, context);
  const auto work = [](void* of, int thread) { static_cast<Loop*>(of)->work(thread); };
  if (!has_openmp_team || !run_on_openmp_team(num_threads(), work, &loop)) {
    per_process<ThreadPool>().run(loop);
  }
}

}  // namespace bucketwheel
