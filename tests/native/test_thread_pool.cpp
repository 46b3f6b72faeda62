// base/thread_pool with an OpenMP runtime of the test's own: every range once, several callers, fork. Run by test_native.py;
// tests/unit/test_threads.py has torch's, and forks.
// needs: base
// link: -rdynamic
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/platform.h"
#include "base/thread_pool.h"
#include "check.h"

using namespace bucketwheel;

namespace {

std::atomic<int> regions{0};
std::atomic<unsigned> last_threads{0};
std::atomic<unsigned> team_limit{100};
thread_local int thread_num = 0;

// Denormals are zero from here on, in this thread: as torch.set_flush_denormal() does.
void flush_denormals() {
#if BW_X86_64
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

}  // namespace

// Starts its threads anew each time; they flush denormals.
extern "C" __attribute__((visibility("default"))) void GOMP_parallel(void (*function)(void*), void* data,
                                                                     unsigned threads, unsigned flags) {
  CHECK(flags == 0);
  ++regions;
  last_threads = threads;
  std::vector<std::thread> team;
  for (int t = 1; t < static_cast<int>(std::min<unsigned>(threads, team_limit)); ++t) {
    team.emplace_back([=] {
      thread_num = t;
      flush_denormals();
      function(data);
    });
  }
  function(data);
  for (std::thread& thread : team) {
    thread.join();
  }
}

extern "C" __attribute__((visibility("default"))) int omp_get_thread_num() { return thread_num; }

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

// The number of parallel regions that a loop over 100 elements took.
int regions_of_a_loop() {
  const int before = regions;
  check_loop(100, 3);
  return regions - before;
}

}  // namespace

TEST(a_team_has_the_threads_asked_for) {
  for (int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(threads));
    CHECK(run_on_openmp_team(
        threads, [](void* of, int thread) { (*static_cast<decltype(calls)*>(of))[static_cast<size_t>(thread)]++; },
        &calls));
    for (const auto& count : calls) {
      CHECK(count == 1);
    }
  }
}

TEST(a_loop_is_one_region_of_the_callers_team) {
  set_num_threads(3);
  CHECK(regions_of_a_loop() == 1 && last_threads == 3);
  set_num_threads(1);
  CHECK(regions_of_a_loop() == 0);
  set_num_threads(2);
  std::thread([] { CHECK(regions_of_a_loop() == 1 && last_threads == 2); }).join();
}

TEST(what_a_late_thread_leaves_is_done_by_the_others) {
  set_num_threads(2);
  const auto self = std::this_thread::get_id();
  std::atomic<int> done_by_caller{0};
  parallel_for(8, 1, [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == self) {
      ++done_by_caller;
      return;
    }
    while (done_by_caller < 7) {  // the other thread stays in its first range
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

TEST(a_team_smaller_than_asked_for_does_all) {
  set_num_threads(4);
  team_limit = 2;
  CHECK(regions_of_a_loop() == 1);
  team_limit = 1;  // within a parallel region
  CHECK(regions_of_a_loop() == 1);
  team_limit = 100;
}

TEST(a_team_computes_by_ieee_rules) {
  set_num_threads(3);
  volatile float small = 1e-30F;
  std::atomic<int> started{0};
  parallel_for(3, 1, [&](int64_t, int64_t) {  // each range waits for all: one a thread
    started.fetch_add(1);
    while (started < 3) {
      std::this_thread::yield();
    }
    CHECK(small * 1e-10F != 0.0F);
  });
  CHECK(started == 3);
}

TEST(ranges_compute_by_ieee_rules_on_every_thread) {
#if BW_X86_64
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // denormals are zero, as torch.set_flush_denormal() has it; new threads inherit that
#endif
  volatile float small = 1e-30F;
  for (int threads : {1, 9}) {
    set_num_threads(threads);
    std::atomic<int> kept{0};
    parallel_for(64, 1, [&](int64_t, int64_t) { kept.fetch_add(small * 1e-10F != 0.0F ? 1 : 0); });
    CHECK(kept == 64);
  }
#if BW_X86_64
  CHECK(_mm_getcsr() == (before | 0x8040) || emulator() == "valgrind");  // which does not keep it
  _mm_setcsr(before);
#endif
}

TEST(a_forked_child_computes_alone) {
  if (!may_fork()) {
    return;
  }
  set_num_threads(3);
  CHECK(regions_of_a_loop() == 1);
  in_child([] { CHECK(regions_of_a_loop() == 0); });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
