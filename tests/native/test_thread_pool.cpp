// base/thread_pool: every range once, several callers, resizing, fork, idle helpers. Run by test_native.py.
// needs: base
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/platform.h"
#include "base/thread_pool.h"
#include "check.h"

using namespace bucketwheel;

namespace {

// Counts how often each element is visited, and checks the ranges.
void check_loop(int64_t count, int64_t grain) {
  std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    CHECK(begin % grain == 0 && begin < end && end <= count);
    CHECK(end == count || end - begin == grain);
    for (int64_t i = begin; i < end; ++i) {
      visits[static_cast<size_t>(i)].fetch_add(1);
    }
  });
  for (const auto& visit : visits) {
    CHECK(visit == 1);
  }
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

// The first: none of the helpers of a larger pool are about to leave.
TEST(what_a_late_thread_leaves_is_done_by_the_others) {
  set_num_threads(2);
  const auto self = std::this_thread::get_id();
  std::atomic<int> done_by_caller{0};
  parallel_for(8, 1, [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == self) {
      ++done_by_caller;
      return;
    }
    while (done_by_caller < 7) {  // the helper stays in its first range
      std::this_thread::yield();
    }
  });
  CHECK(done_by_caller >= 7);
}

TEST(every_range_runs_once) {
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (int64_t count : {0, 1, 2, 7, 100, 1001}) {
      for (int64_t grain : {1, 2, 7, 1000, 2000}) {
        check_loop(count, grain);
      }
    }
  }
}

TEST(several_callers_at_once) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([c] {
      for (int i = 0; i < 150; ++i) {
        check_loop(1 + (i * 7 + c) % 50, 1 + i % 4);
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
}

TEST(loops_may_nest) {
  set_num_threads(3);
  std::atomic<int64_t> sum{0};
  parallel_for(8, 1, [&](int64_t begin, int64_t) {
    parallel_for(20, 3, [&](int64_t a, int64_t b) { sum.fetch_add(begin * (b - a)); });
  });
  CHECK(sum == 28 * 20);
}

TEST(resizing_while_loops_run) {
  std::atomic<bool> is_over{false};
  std::thread resizer([&] {
    for (int i = 0; !is_over; ++i) {
      set_num_threads(1 + i % 5);
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 400; ++i) {
    check_loop(40, 1 + i % 3);
  }
  is_over = true;
  resizer.join();
  set_num_threads(4);
  for (int i = 0; i < 50; ++i) {
    check_loop(40, 1);
  }
}

TEST(idle_helpers_use_no_cpu) {
  set_num_threads(4);
  check_loop(100, 1);
  nap(20);  // more than the time they spin
  const double before = cpu_seconds();
  nap(300);
  CHECK(cpu_seconds() - before < 0.1 || !emulator().empty());  // whose own time counts too
}

TEST(a_forked_child_has_a_pool_of_its_own) {
  if (!may_fork()) {
    return;
  }
#if defined(__SANITIZE_THREAD__)
  std::fprintf(stderr,
               "skipped: the thread sanitizer takes the child's threads for the parent's (equal pthread ids)\n");
  return;
#endif
  set_num_threads(3);
  check_loop(100, 1);
  std::atomic<bool> is_over{false};
  std::thread busy([&] {  // the parent's pool is in use at the fork, perhaps its lock held
    while (!is_over) {
      check_loop(30, 1);
    }
  });
  for (int i = 0; i < 5; ++i) {
    in_child([] {
      CHECK(num_threads() == 3);
      std::atomic<int> started{0};
      parallel_for(2, 1, [&](int64_t, int64_t) {
        started.fetch_add(1);
        while (started < 2) {
          std::this_thread::yield();
        }
      });
      check_loop(100, 3);
    });
  }
  is_over = true;
  busy.join();
  check_loop(100, 1);
}

TEST(ranges_compute_by_ieee_rules_on_every_thread) {
#if BW_X86_64
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // denormals are zero, as torch.set_flush_denormal() has it; new threads inherit that
#endif
  volatile float small = 1e-30F;
  for (int threads : {1, 9}) {
    set_num_threads(threads);  // more than any test before: new helpers
    std::atomic<int> kept{0};
    parallel_for(64, 1, [&](int64_t, int64_t) { kept.fetch_add(small * 1e-10F != 0.0F ? 1 : 0); });
    CHECK(kept == 64);
  }
#if BW_X86_64
  CHECK(_mm_getcsr() == (before | 0x8040) || emulator() == "valgrind");  // which does not keep it
  _mm_setcsr(before);
#endif
}

TEST(without_a_runtime_a_thread_that_asks_for_a_team_uses_the_pool) {
  use_openmp_team();
  CHECK(!run_on_openmp_team(2, [](void*, int) {}, nullptr));
  set_num_threads(3);
  check_loop(100, 3);
}

TEST(all_sleeping_helpers_are_woken_for_a_loop_that_has_work_for_them) {
  constexpr int kThreads = 80;
  set_num_threads(kThreads);
  nap(200);
  std::atomic<int> started{0};
  parallel_for(kThreads, 1, [&](int64_t, int64_t) {  // each range waits for all
    started.fetch_add(1);
    while (started < kThreads) {
      std::this_thread::yield();
    }
  });
  CHECK(started == kThreads);
  set_num_threads(1);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
