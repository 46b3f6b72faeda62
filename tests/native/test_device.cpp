// device/: streams, events, helping waiters, fork. Run by test_native.py.
// needs: base device
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/futex.h"
#include "check.h"
#include "device/device.h"

using namespace bucketwheel;

namespace {

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Blocks a stream until opened.
struct Gate {
  std::atomic<bool> is_open{false};
  void open() { is_open = true; }
  void wait() const {
    while (!is_open) {
      std::this_thread::yield();
    }
  }
};

// With BW_HOST_STREAM=inline a task runs at once, so nothing can be held back.
bool is_inline() { return env().stream_inline; }

}  // namespace

TEST(tasks_run_in_order) {
  auto stream = cpu_device().new_stream("order");
  std::vector<int> ran;
  for (int i = 0; i < 1000; ++i) {
    stream->run([&ran, i] { ran.push_back(i); });
  }
  CHECK(stream->synchronize());
  CHECK(ran.size() == 1000);
  for (int i = 0; i < 1000; ++i) {
    CHECK(ran[i] == i);
  }
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

TEST(event_completes_after_what_was_enqueued_before_it) {
  auto stream = cpu_device().new_stream("event");
  CHECK(stream->record()->query());
  if (is_inline()) {
    return;
  }
  Gate gate;
  stream->run([&] { gate.wait(); });
  EventRef behind = stream->record();
  CHECK(!behind->query());
  CHECK(!behind->synchronize(deadline_in(0.02)));
  stream->run([] {});
  EventRef last = stream->record();
  gate.open();
  CHECK(behind->synchronize(deadline_in(30)));
  CHECK(last->synchronize());
  CHECK(behind->query() && last->query());
}

TEST(task_is_destroyed_before_its_event_completes) {
  auto stream = cpu_device().new_stream("destroyed");
  for (int i = 0; i < 200; ++i) {
    auto owned = std::make_shared<int>(i);
    std::weak_ptr<int> watched = owned;
    stream->run([owned = std::move(owned)] {});
    EventRef event = stream->record();
    while (!event->query()) {
      std::this_thread::yield();
    }
    CHECK(watched.expired());
  }
}

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

TEST(stream_waits_for_an_event_of_another) {
  auto producer = cpu_device().new_stream("producer");
  auto consumer = cpu_device().new_stream("consumer");
  int value = 0;  // unguarded: ordered by the event alone
  for (int i = 1; i <= 300; ++i) {
    producer->run([&value, i] {
      if (i % 50 == 0) {
        pause_ms(1);
      }
      value = i;
    });
    consumer->wait(producer->record());
    int seen = 0;
    consumer->run([&value, &seen] { seen = value; });
    EventRef read = consumer->record();
    producer->wait(read);  // the next write comes after this read
    CHECK(read->synchronize());
    CHECK(seen == i);
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

TEST(task_may_wait_for_another_stream) {
  auto outer = cpu_device().new_stream("outer");
  auto inner = cpu_device().new_stream("inner");
  int value = 0;
  for (int i = 0; i < 200; ++i) {
    inner->run([&] { ++value; });
    outer->run([event = inner->record()] { event->synchronize(); });
    CHECK(outer->record()->synchronize());
    CHECK(value == i + 1);
  }
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

TEST(timed_events_measure) {
  auto stream = cpu_device().new_stream("timed");
  EventRef start = stream->record(true);
  stream->run([] { pause_ms(5); });
  EventRef end = stream->record(true);
  EventRef plain = stream->record();
  CHECK(stream->synchronize());
  CHECK(end->elapsed_s(*start) >= 0.004 && end->elapsed_s(*start) < 30);
  CHECK(start->elapsed_s(*end) < 0);
  CHECK_THROWS(ValueError, "recorded with timing", end->elapsed_s(*plain));
}

TEST(close_drains_and_refuses) {
  auto stream = cpu_device().new_stream("closed");
  std::atomic<int> ran{0};
  for (int i = 0; i < 50; ++i) {
    stream->run([&] { ++ran; });
  }
  EventRef last = stream->record();
  stream->close();
  CHECK(ran == 50);
  CHECK(last->query() && last->synchronize());
  CHECK_THROWS(DeviceError, "stream 'closed' is closed", stream->run([] {}));
  CHECK_THROWS(DeviceError, "is closed", stream->record());
  CHECK_THROWS(DeviceError, "is closed", stream->wait(last));
  stream->close();
}

TEST(stream_may_be_dropped_with_work_by_anyone) {
  std::atomic<int> ran{0};
  EventRef outlives;
  {
    auto stream = cpu_device().new_stream("dropped");
    for (int i = 0; i < 20; ++i) {
      stream->run([&] { ++ran; });
    }
    outlives = stream->record();
  }
  CHECK(ran == 20 && outlives->query());
  // By its own task, as the last owner.
  std::atomic<bool> is_over{false};
  auto stream = cpu_device().new_stream("own task");
  stream->run([&, stream] { pause_ms(1); });
  stream->run([&] { is_over = true; });
  EventRef last = stream->record();
  stream.reset();
  CHECK(last->synchronize(deadline_in(30)));
  CHECK(is_over);
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
    b->reset();
  });
  a->run([] {});
  (*b)->wait(a->record());
  (*b)->run([&] { is_over = true; });
  EventRef last = (*b)->record();
  b.reset();
  gate.open();
  CHECK(a->synchronize(deadline_in(30)));
  CHECK(last->synchronize(deadline_in(30)));
  CHECK(is_over);
}

TEST(preconditions) {
  auto stream = cpu_device().new_stream("bad");
  CHECK_THROWS(ValueError, "got no task", stream->run(nullptr));
  CHECK_THROWS(ValueError, "got no event", stream->wait(nullptr));
  CHECK(stream->record()->query());  // and the stream is as before
}

// The processor time of a process whose streams have nothing to do.
TEST(idle_streams_use_no_processor) {
  std::vector<StreamRef> streams;
  for (int i = 0; i < 8; ++i) {
    streams.push_back(cpu_device().new_stream("idle"));
    streams.back()->run([] {});
    streams.back()->synchronize();
  }
  pause_ms(20);
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  pause_ms(200);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double used_ms = (after.tv_sec - before.tv_sec) * 1e3 + (after.tv_nsec - before.tv_nsec) * 1e-6;
  CHECK(used_ms < 20);
}

// In a forked child the parent's streams refuse and new ones work; the parent's go on.
TEST(fork_child_refuses_the_parents_streams) {
  auto stream = cpu_device().new_stream("parent");
  stream->run([] {});
  EventRef done = stream->record();
  CHECK(done->synchronize());
  Gate gate;
  EventRef open_at_fork = done;
  if (!is_inline()) {
    stream->run([&] { gate.wait(); });
    open_at_fork = stream->record();
  }
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);
    CHECK_THROWS(DeviceError, "belongs to the parent process", stream->run([] {}));
    CHECK_THROWS(DeviceError, "belongs to the parent process", stream->record());
    CHECK_THROWS(DeviceError, "'spawn'", stream->synchronize());
    CHECK(done->query());
    if (!is_inline()) {
      CHECK_THROWS(DeviceError, "belongs to the parent process", open_at_fork->query());
      CHECK_THROWS(DeviceError, "belongs to the parent process", open_at_fork->synchronize());
    }
    if (kMayStartThreadsAfterFork) {
      auto own = cpu_device().new_stream("child");
      if (!is_inline()) {
        CHECK_THROWS(DeviceError, "belongs to the parent process", own->wait(open_at_fork));
      }
      int ran = 0;
      own->run([&] { ran = 1; });
      CHECK(own->synchronize());
      CHECK(ran == 1);
    }
    stream.reset();
    open_at_fork.reset();
    std::_Exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  gate.open();
  CHECK(stream->synchronize(deadline_in(30)));
}

TEST(futex_wait_times_out_and_wakes) {
  std::atomic<uint32_t> word{7};
  CHECK(futex_wait(word, 8));  // not the expected value: returns at once
  CHECK(!futex_wait(word, 7, deadline_in(0.01)));
  std::thread waker([&] {
    pause_ms(5);
    word = 9;
    futex_wake_all(word, FutexScope::kShared);
  });
  while (word == 7) {
    CHECK(futex_wait(word, 7, deadline_in(30), FutexScope::kShared));
  }
  waker.join();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
