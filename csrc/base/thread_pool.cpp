#include "base/thread_pool.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>

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

std::atomic<int> wanted_threads{1};

// A loop in progress. Lives on its caller's stack.
//
// Each thread has a *home*, an equal part of the ranges (with more than kMaxHomes threads several share one). It takes
// those first, in order, then what is left in other homes. So repeated loops find their memory in the cache of the
// same core, and the others take over the part of a thread that comes late.
class Loop {
 public:
  Loop(int64_t count, int64_t grain, RangeFunction function, void* context)
      : count_(count), grain_(grain), function_(function), context_(context) {
    const int64_t ranges = (count - 1) / grain + 1;
    homes_ = static_cast<int>(std::min<int64_t>({ranges, num_threads(), kMaxHomes}));
    for (int64_t h = 0; h < homes_; ++h) {
      home_[h].next.store(ranges * h / homes_, std::memory_order_relaxed);
      home_[h].end = ranges * (h + 1) / homes_;
    }
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
  int homes_;
  std::array<Home, kMaxHomes> home_;
};

}  // namespace

void set_num_threads(int threads) { wanted_threads = std::clamp(threads, 1, kMaxThreads); }

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
  if (!run_on_openmp_team(num_threads(), [](void* of, int thread) { static_cast<Loop*>(of)->work(thread); }, &loop)) {
    loop.work(0);
  }
}

}  // namespace bucketwheel
