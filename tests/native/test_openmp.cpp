// base/openmp and the loops that use it, with an OpenMP runtime of the test's own. Run by test_native.py;
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

// The number of parallel regions that a loop over 100 elements took; each element must have been visited once.
int regions_of_a_loop() {
  const int before = regions;
  std::vector<std::atomic<int>> visits(100);
  parallel_for(100, 3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      visits[static_cast<size_t>(i)].fetch_add(1);
    }
  });
  for (const auto& visit : visits) {
    CHECK(visit == 1);
  }
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

TEST(loops_run_on_the_team_of_a_thread_that_has_one) {
  set_num_threads(3);
  CHECK(regions_of_a_loop() == 0);
  std::thread([] {
    use_openmp_team();
    CHECK(regions_of_a_loop() == 1 && last_threads == 3);
    set_num_threads(1);
    CHECK(regions_of_a_loop() == 0);
    set_num_threads(2);
    CHECK(regions_of_a_loop() == 1 && last_threads == 2);
    std::thread([] { CHECK(regions_of_a_loop() == 0); }).join();  // not this thread: it takes the pool's
  }).join();
  CHECK(regions_of_a_loop() == 0);
}

TEST(a_team_smaller_than_asked_for_does_all) {
  set_num_threads(4);
  use_openmp_team();
  team_limit = 2;
  CHECK(regions_of_a_loop() == 1);
  team_limit = 1;  // within a parallel region
  CHECK(regions_of_a_loop() == 1);
  team_limit = 100;
}

TEST(a_team_computes_by_ieee_rules) {
  set_num_threads(3);
  use_openmp_team();
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

int main(int argc, char** argv) { return run_tests(argc, argv); }
