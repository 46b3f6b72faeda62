// device/: what streams and events promise. Run by test_native.py; test_device.py has deadlines, times
// and fork, test_host_queue.cpp the order of tasks.
// needs: base device
#include <atomic>
#include <memory>
#include <thread>

#include "base/futex.h"
#include "check.h"
#include "device/device.h"

using namespace bucketwheel;

namespace {

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

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
