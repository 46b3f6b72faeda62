#include "queues.h"

#include <algorithm>
#include <deque>
#include <list>
#include <mutex>
#include <random>
#include <utility>

namespace fake_cuda {

namespace {

struct Work {
  Task task = nullptr;
  MarkRef waits_for = nullptr;
  MarkRef records = nullptr;
  Clock host = {};  // what the host knew when it enqueued this
  const std::string* where = nullptr;
  bool is_watched = false;  // the next one behind the dropped wait
};

}  // namespace

struct Queue {
  const void* stream = nullptr;
  size_t actor = 0;
  std::string name;
  Clock known = {};
  std::deque<Work> works = {};
};

namespace {

constexpr size_t kHost = 0;  // among the actors

std::atomic<bool> is_on{false};
std::recursive_mutex mutex;  // of all below, held while work runs, which may say what it accesses
thread_local const char default_stream = 0;
thread_local std::string place;

struct Check {
  Check(uint64_t number, uint64_t seed, uint64_t dropped)
      : number(number), random(seed), eagerness(random() % 8), dropped(dropped) {}

  Queue& queue_of(cudaStream_t stream) {
    const void* const key = stream != nullptr ? static_cast<const void*>(stream) : &default_stream;
    const auto found = std::ranges::find(queues, key, &Queue::stream);
    if (found != queues.end()) {
      return *found;
    }
    const size_t actor = ++last_actor;
    queues.push_back({key, actor, (stream != nullptr ? "stream " : "default stream ") + std::to_string(actor)});
    return queues.back();
  }

  void push(cudaStream_t stream, Work work) {
    Queue& queue = queue_of(stream);
    work.host = host;
    work.where = races.keep(queue.name + (place.empty() ? "" : " at " + place));
    work.is_watched = work.task != nullptr && is_watching;
    is_watching = is_watching && !work.is_watched;
    queue.works.push_back(std::move(work));
    if (stream == nullptr) {
      run_all(queue);
    } else {
      run_some();
    }
  }

  void run_first(Queue& queue) {
    const Work work = std::move(queue.works.front());
    queue.works.pop_front();
    queue.known.join(work.host);
    const uint32_t number = queue.known.tick(queue.actor);
    if (work.waits_for != nullptr) {
      queue.known.join(work.waits_for->clock);
    }
    if (work.is_watched) {
      is_implied = queue.known.covers(dropped_mark->clock) && dropped_mark->query();
    }
    if (work.records != nullptr) {
      work.records->clock = queue.known;
      work.records->complete();
    }
    if (work.task) {
      running = &queue;
      piece = {queue.actor, number, "", work.where};
      work.task();
      running = nullptr;
    }
  }
  static bool can_run(const Queue& queue) {
    return !queue.works.empty() && (queue.works.front().waits_for == nullptr || queue.works.front().waits_for->query());
  }
  // The first work, and before it what it waits for.
  void reach_first(Queue& queue) {
    if (!can_run(queue)) {
      run_to(*queue.works.front().waits_for);
    }
    run_first(queue);
  }
  void run_to(Mark& mark) {
    while (!mark.query()) {
      reach_first(*mark.queue);
    }
  }
  void run_all(Queue& queue) {
    while (!queue.works.empty()) {
      reach_first(queue);
    }
  }
  void run_some() {
    std::vector<Queue*> able;
    while (random() % 8 < eagerness) {
      able.clear();
      for (Queue& queue : queues) {
        if (can_run(queue)) {
          able.push_back(&queue);
        }
      }
      if (able.empty()) {
        return;
      }
      run_first(*able[random() % able.size()]);
    }
  }

  // Of work from before the check, which is over.
  bool is_past(const Mark& mark) const { return mark.check != number; }
  // Counts a wait; false: it is the one to forget, or is for the past.
  bool has_to_wait(const MarkRef& mark) {
    if (is_past(*mark) || ++waits != dropped) {
      return !is_past(*mark);
    }
    dropped_mark = mark;
    is_watching = true;
    return false;
  }

  const uint64_t number;
  std::mt19937_64 random;
  const uint64_t eagerness;  // eighths of the times that work runs which need not
  std::list<Queue> queues;   // as they were first used, so that the same calls are the same schedule
  size_t last_actor = kHost;
  Clock host;
  Races races;
  Queue* running = nullptr;
  Piece piece;  // that runs
  const uint64_t dropped;
  uint64_t waits = 0;
  MarkRef dropped_mark;
  bool is_watching = false;  // from the dropped wait to the next work
  bool is_implied = false;
};
std::unique_ptr<Check>& check() {
  static auto* const one = new std::unique_ptr<Check>();
  return *one;
}

}  // namespace

bool is_checked() { return is_on; }

void begin_check(uint64_t seed, uint64_t dropped) {
  std::lock_guard lock(mutex);
  static uint64_t number = 0;
  check() = std::make_unique<Check>(++number, seed, dropped);
  is_on = true;
}

Checked end_check() {
  std::lock_guard lock(mutex);
  for (Queue& queue : check()->queues) {
    check()->run_all(queue);
  }
  is_on = false;
  return {check()->races.found(), check()->waits, check()->is_implied};
}

void set_place(std::string text) { place = std::move(text); }

void access(const void* data, size_t size_bytes, bool writes, const char* what) {
  if (!is_on) {
    return;
  }
  std::lock_guard lock(mutex);
  Check& now = *check();
  if (now.running != nullptr) {
    now.piece.what = what;
    now.races.access(data, size_bytes, writes, now.piece, now.running->known);
  }
}

void access_on_host(const void* data, size_t size_bytes, bool writes, const char* what) {
  if (!is_on) {
    return;
  }
  std::lock_guard lock(mutex);
  Check& now = *check();
  const std::string* const where = now.races.keep("the host" + (place.empty() ? "" : " at " + place));
  now.races.access(data, size_bytes, writes, {kHost, now.host.tick(kHost), what, where}, now.host);
}

void push_work(cudaStream_t stream, Task task) {
  std::lock_guard lock(mutex);
  check()->push(stream, {.task = std::move(task)});
}

void push_record(cudaStream_t stream, const MarkRef& mark) {
  std::lock_guard lock(mutex);
  mark->check = check()->number;
  mark->queue = &check()->queue_of(stream);
  check()->push(stream, {.records = mark});
}

void push_wait(cudaStream_t stream, const MarkRef& mark) {
  std::lock_guard lock(mutex);
  if (check()->has_to_wait(mark)) {
    check()->push(stream, {.waits_for = mark});
  }
}

bool query(Mark& mark) {
  std::lock_guard lock(mutex);
  Check& now = *check();
  if (now.is_past(mark) || (mark.query() && now.host.covers(mark.clock))) {
    return true;
  }
  now.run_some();
  if (now.random() % 8 != 0) {  // it may have run only just now, or run in time
    return false;
  }
  now.run_to(mark);
  now.host.join(mark.clock);
  return true;
}

void synchronize(const MarkRef& mark) {
  std::lock_guard lock(mutex);
  if (check()->has_to_wait(mark)) {
    check()->run_to(*mark);
    check()->host.join(mark->clock);
  }
}

void synchronize(cudaStream_t stream) {
  std::lock_guard lock(mutex);
  Queue& queue = check()->queue_of(stream);
  check()->run_all(queue);
  check()->host.join(queue.known);
}

void synchronize_device() {
  std::lock_guard lock(mutex);
  for (Queue& queue : check()->queues) {
    check()->run_all(queue);
    check()->host.join(queue.known);
  }
}

void remove_queue(cudaStream_t stream) {
  std::lock_guard lock(mutex);
  Queue& queue = check()->queue_of(stream);
  check()->run_all(queue);
  check()->queues.remove_if([&queue](const Queue& one) { return &one == &queue; });
}

void forget(const void* data, size_t size_bytes) {
  std::lock_guard lock(mutex);
  check()->races.forget(data, size_bytes);
}

}  // namespace fake_cuda

// The same for Python, by ctypes.
extern "C" {
__attribute__((visibility("default"))) void fake_cuda_begin_check(uint64_t seed) { fake_cuda::begin_check(seed); }
// The races, a line each; valid until the next call.
__attribute__((visibility("default"))) const char* fake_cuda_end_check() {
  static auto* const text = new std::string();
  text->clear();
  for (const std::string& race : fake_cuda::end_check().races) {
    *text += race + '\n';
  }
  return text->c_str();
}
__attribute__((visibility("default"))) void fake_cuda_at(const char* text) { fake_cuda::set_place(text); }
__attribute__((visibility("default"))) void fake_cuda_name_stream(void* stream, const char* name) {
  std::lock_guard lock(fake_cuda::mutex);
  fake_cuda::check()->queue_of(static_cast<cudaStream_t>(stream)).name = name;
}
// Runs what is in a stream, and what that waits for: somebody is about to do the stream's next work in its place. No wait
// of the host, who knows no more than before.
__attribute__((visibility("default"))) void fake_cuda_drain(void* stream) {
  std::lock_guard lock(fake_cuda::mutex);
  fake_cuda::check()->run_all(fake_cuda::check()->queue_of(static_cast<cudaStream_t>(stream)));
}
// Work of the stream that was done by somebody else, and what it accessed.
__attribute__((visibility("default"))) void fake_cuda_access(void* stream, const void* data, size_t size_bytes,
                                                             int writes, const char* what) {
  std::lock_guard lock(fake_cuda::mutex);
  const char* const kept = fake_cuda::check()->races.keep(what)->c_str();
  fake_cuda::push_work(static_cast<cudaStream_t>(stream),
                       [=] { fake_cuda::access(data, size_bytes, writes != 0, kept); });
}
}
