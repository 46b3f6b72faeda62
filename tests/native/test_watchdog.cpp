// comm/watchdog: who is looked after, when, and what stop() promises. Run by test_native.py.
// needs: base device
// with: csrc/comm/peers/watchdog.cpp
// runs: plain thread address
// slow: plain address
#include <dirent.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/peers/watchdog.h"

using namespace bucketwheel;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

int count_threads() {
  DIR* const folder = opendir("/proc/self/task");
  CHECK(folder != nullptr);
  int count = 0;
  while (const dirent* const entry = readdir(folder)) {
    count += entry->d_name[0] != '.' ? 1 : 0;
  }
  closedir(folder);
  return count;
}

}  // namespace

TEST(stop_waits_for_a_look_that_runs) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> is_inside{false};
    std::atomic<bool> may_end{false};
    int looks = 0;  // not atomic: after stop() it is ours, and more than one if the stopper was late
    const auto watching = watch([&] {
      ++looks;
      is_inside = true;
      sleep_until([&] { return may_end.load(); });
      std::this_thread::sleep_for(2ms);
      is_inside = false;
    });
    sleep_until([&] { return is_inside.load(); });
    std::atomic<bool> has_stopped{false};
    std::thread stopper([&] {
      watching->stop();
      has_stopped = true;
      CHECK(!is_inside);
    });
    std::this_thread::sleep_for(2ms);
    CHECK(!has_stopped);
    may_end = true;
    stopper.join();
    CHECK(looks >= 1);
  }
}

TEST(nothing_is_called_after_stop) {
  const auto held = std::make_shared<int>(0);
  std::atomic<bool> may_look{true};
  std::atomic<int> looks{0};
  const auto watching = watch([&, held] {
    CHECK(may_look);
    ++looks;
  });
  sleep_until([&] { return looks >= 1; });
  watching->stop();
  may_look = false;
  CHECK(held.use_count() == 1);  // what the look holds is free
  watching->stop();              // again: nothing
  std::atomic<int> others{0};
  const auto other = watch([&] { ++others; });
  sleep_until([&] { return others >= 3; });  // the thread runs on
  other->stop();
}

// Without stop() nothing waits for a look that runs: what it uses must be its own.
TEST(a_watch_that_is_dropped_is_not_called_any_more) {
  const auto held = std::make_shared<int>(0);
  const auto looks = std::make_shared<std::atomic<int>>(0);
  auto watching = watch([held, looks] { ++*looks; });
  sleep_until([&] { return *looks >= 1; });
  watching.reset();
  sleep_until([&] { return held.use_count() == 1; });  // the thread may have it for the time of a look
  const int before = *looks;
  std::this_thread::sleep_for(250ms);
  CHECK(*looks == before);
}

TEST(waking_has_everything_looked_after_at_once) {
  std::atomic<int> looks{0};
  const auto watching = watch([&] { ++looks; });
  sleep_until([&] { return looks >= 1; });
  const auto begin = Clock::now();
  for (int round = 0; round < 50; ++round) {
    const int before = looks;
    wake_watchdog();
    sleep_until([&] { return looks > before; });
  }
  CHECK(Clock::now() - begin < 3s);  // 5 s without
  watching->stop();
}

TEST(watching_and_stopping_from_many_threads) {
  std::atomic<int> looks{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        auto is_alive = std::make_unique<std::atomic<bool>>(true);
        const int before = looks;
        const auto watching = watch([&looks, alive = is_alive.get()] {
          CHECK(*alive);
          ++looks;
        });
        wake_watchdog();
        if (round % 3 == 0) {
          std::this_thread::yield();
        }
        if (round % 50 == 0) {
          sleep_until([&] { return looks > before; });
        }
        watching->stop();
        is_alive.reset();  // a look after stop() would read freed memory
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(the_thread_ends_when_nothing_is_watched_and_another_comes) {
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> looks{0};
    auto watching = watch([&] { ++looks; });
    sleep_until([&] { return looks >= 1; });
    const int with = count_threads();
    watching->stop();
    watching.reset();
    sleep_until([&] { return count_threads() == with - 1; });
  }
}

TEST(a_forked_child_has_its_own) {
  if (!may_fork() || !may_start_threads_after_fork()) {
    return;
  }
  std::atomic<int> looks{0};
  const auto watching = watch([&] { ++looks; });
  sleep_until([&] { return looks >= 1; });
  in_child([&] {
    const int inherited = looks;
    std::atomic<int> own{0};
    wake_watchdog();  // of nobody: the parent's thread and lock are not here
    const auto mine = watch([&] { ++own; });
    sleep_until([&] { return own >= 3; });
    CHECK(looks == inherited);  // the parent's is not looked after here
    mine->stop();
  });
  const int before = looks;
  sleep_until([&] { return looks >= before + 2; });  // and goes on here
  watching->stop();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
