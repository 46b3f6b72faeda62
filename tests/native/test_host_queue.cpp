// device/host_queue: worker and helping waiters, whoever waits for whom. Run by test_native.py.
// needs: base device
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "gate.h"

using namespace bucketwheel;

TEST(waiting_host_runs_the_tasks_itself) {
  if (is_inline()) {
    return;
  }
  auto stream = cpu_device().new_stream("helped");
  auto other = cpu_device().new_stream("other");
  int by_host = 0;
  int by_worker = 0;
  const auto host = std::this_thread::get_id();
  for (int i = 0; i < 2000; ++i) {
    stream->run([&] { ++(std::this_thread::get_id() == host ? by_host : by_worker); });
    CHECK(stream->record()->synchronize());
  }
  CHECK(by_host + by_worker == 2000);
  CHECK(by_host > 0);
  // Left alone, the worker does it.
  std::atomic<bool> is_done{false};
  std::thread::id who;
  other->run([&] {
    who = std::this_thread::get_id();
    is_done = true;
  });
  while (!is_done) {
    std::this_thread::yield();
  }
  CHECK(who != host);
}

TEST(helper_stops_at_its_event_and_the_worker_goes_on) {
  if (is_inline()) {
    return;
  }
  auto stream = cpu_device().new_stream("handed");
  for (int i = 0; i < 300; ++i) {
    std::atomic<int> ran{0};
    Gate gate;
    stream->run([&] { ran = 1; });
    EventRef first = stream->record();
    stream->run([&] { gate.wait(); });  // would hold the host for ever if it went on helping
    stream->run([&] { ran = 2; });
    CHECK(first->synchronize());
    CHECK(ran >= 1);
    gate.open();
    while (ran != 2) {
      std::this_thread::yield();
    }
  }
}

TEST(waiter_with_a_deadline_does_not_help) {
  if (is_inline()) {
    return;
  }
  auto stream = cpu_device().new_stream("deadline");
  for (int i = 0; i < 50; ++i) {
    Gate gate;
    stream->run([&] { gate.wait(); });
    CHECK(!stream->record()->synchronize(deadline_in(0.001)));  // had it helped, it would be at the gate for ever
    gate.open();
    CHECK(stream->synchronize());
  }
}

TEST(only_the_worker_runs_tasks_of_a_worker_stream) {
  if (is_inline()) {
    return;
  }
  auto stream = new_worker_stream("alone");
  std::thread::id runner;
  for (int i = 0; i < 500; ++i) {
    std::thread::id who;
    stream->run([&] { who = std::this_thread::get_id(); });
    CHECK(stream->record()->synchronize());
    CHECK(who != std::this_thread::get_id() && (i == 0 || who == runner));
    runner = who;
  }
}

TEST(many_waiters_all_wake) {
  auto stream = cpu_device().new_stream("wake");
  for (int round = 0; round < 30; ++round) {
    Gate gate;
    if (!is_inline()) {
      stream->run([&] { gate.wait(); });
    }
    std::vector<std::thread> waiters;
    std::atomic<int> woken{0};
    for (int i = 0; i < 6; ++i) {
      stream->run([] {});
      waiters.emplace_back([&woken, i, event = stream->record()] {
        CHECK(i % 2 ? event->synchronize() : event->synchronize(deadline_in(30)));
        ++woken;
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    gate.open();
    for (auto& waiter : waiters) {
      waiter.join();
    }
    CHECK(woken == 6);
  }
}

// The host helps A, whose entry waits for B, whose entry waits for C, behind a wait for A's past.
TEST(host_helps_through_a_chain_of_streams) {
  auto a = cpu_device().new_stream("a");
  auto b = cpu_device().new_stream("b");
  auto c = cpu_device().new_stream("c");
  for (int i = 0; i < 500; ++i) {
    std::vector<char> order;
    a->run([&] { order.push_back('1'); });
    c->wait(a->record());
    c->run([&] { order.push_back('2'); });
    b->wait(c->record());
    b->run([&] { order.push_back('3'); });
    a->wait(b->record());
    a->run([&] { order.push_back('4'); });
    CHECK(a->record()->synchronize());
    CHECK(std::string(order.begin(), order.end()) == "1234");
  }
}

// Both streams wait for each other's past and two hosts help both: a lock order mistake would hang here.
TEST(two_hosts_help_two_streams_that_wait_for_each_other) {
  auto a = cpu_device().new_stream("a");
  auto b = cpu_device().new_stream("b");
  std::atomic<int> ran{0};
  auto host = [&](StreamRef mine, StreamRef other) {
    for (int i = 0; i < 1000; ++i) {
      mine->run([&] { ++ran; });
      other->wait(mine->record());
      other->run([&] { ++ran; });
      CHECK((i % 2 ? mine : other)->record()->synchronize());
    }
  };
  std::thread second(host, b, a);
  host(a, b);
  second.join();
  a->synchronize();
  b->synchronize();
  CHECK(ran == 4000);
}

TEST(task_that_waits_for_itself_is_refused) {
  auto stream = cpu_device().new_stream("self");
  std::atomic<bool> was_refused{false};
  stream->run([&] {
    stream->run([] {});
    EventRef later = stream->record();
    CHECK_THROWS(DeviceError, "waits for work queued behind itself", later->synchronize());
    was_refused = true;
  });
  CHECK(stream->record()->synchronize());
  CHECK(was_refused);
}

TEST(tasks_of_one_thread_stay_in_order_among_others) {
  auto stream = cpu_device().new_stream("many");
  constexpr int kThreads = 4;
  constexpr int kTasks = 2000;
  std::vector<std::pair<int, int>> ran;  // unguarded: the stream runs one task at a time
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) {
        stream->run([&ran, t, i] { ran.emplace_back(t, i); });
        if (i % 97 == t) {
          stream->record()->synchronize();  // helpers and the worker take turns
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(stream->synchronize());
  CHECK(ran.size() == kThreads * kTasks);
  int next[kThreads] = {};
  for (auto [t, i] : ran) {
    CHECK(next[t] == i);
    next[t]++;
  }
}

// A task drops the last reference to a stream that waits for what comes after the task: joining would wait for ever.
TEST(stream_may_be_dropped_by_a_task_it_waits_for) {
  if (is_inline()) {
    return;
  }
  Gate gate;
  std::atomic<bool> is_over{false};
  auto a = cpu_device().new_stream("a");
  auto b = std::make_shared<StreamRef>(cpu_device().new_stream("b"));
  a->run([b, &gate] {
    gate.wait();
    *b = nullptr;
  });
  a->run([] {});
  (*b)->wait(a->record());
  (*b)->run([&] { is_over = true; });
  EventRef last = (*b)->record();
  b = nullptr;
  gate.open();
  CHECK(a->synchronize(deadline_in(30)));
  CHECK(last->synchronize(deadline_in(30)));
  CHECK(is_over);
}

// The processor time of a process whose streams have nothing to do.
TEST(idle_streams_use_no_processor) {
  std::vector<StreamRef> streams;
  for (int i = 0; i < 8; ++i) {
    streams.push_back(cpu_device().new_stream("idle"));
    streams.back()->run([] {});
    streams.back()->synchronize();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const int64_t used_ns = (after.tv_sec - before.tv_sec) * 1'000'000'000 + (after.tv_nsec - before.tv_nsec);
  CHECK(used_ns < 20'000'000);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
