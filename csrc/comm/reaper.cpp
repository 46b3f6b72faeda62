#include "comm/reaper.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::seconds kLastPatience{1};

struct Reaper {
  std::mutex mutex;
  std::condition_variable is_idle;
  bool has_stopped = false;
  std::vector<Handle::Keepalive> waiting;
  bool is_running = false;
  uint64_t fork_generation = 0;

  void run() {
    for (;;) {
      std::vector<Handle::Keepalive> now;  // freed without the lock
      std::lock_guard lock(mutex);
      if (has_stopped) {
        new std::vector<Handle::Keepalive>(std::move(waiting));
        waiting.clear();
      }
      if (waiting.empty()) {
        is_running = false;
        is_idle.notify_all();
        return;
      }
      now.swap(waiting);
    }
  }
};

// Never freed: the thread may outlive static objects. A forked child has its own.
Reaper& reaper() {
  static std::atomic<Reaper*> current{nullptr};
  Reaper* known = current.load();
  while (known == nullptr || known->fork_generation != fork_generation()) {
    auto* const made = new Reaper;
    made->fork_generation = fork_generation();
    if (current.compare_exchange_strong(known, made)) {
      return *made;
    }
    delete made;
  }
  return *known;
}

}  // namespace

void free_later(std::vector<Handle::Keepalive> keepalive) {
  if (keepalive.empty()) {
    return;
  }
  Reaper& all = reaper();
  std::lock_guard lock(all.mutex);
  if (all.has_stopped) {
    new std::vector<Handle::Keepalive>(std::move(keepalive));
    return;
  }
  all.waiting.insert(all.waiting.end(), std::make_move_iterator(keepalive.begin()),
                     std::make_move_iterator(keepalive.end()));
  if (!all.is_running) {
    try {
      std::thread([&all] {
        own_cuda_thread();
        all.run();
      }).detach();
      all.is_running = true;
    } catch (const std::system_error&) {  // no thread to be had: the next call tries again
    }
  }
}

void stop_freeing() noexcept {
  Reaper& all = reaper();
  std::unique_lock lock(all.mutex);
  all.has_stopped = true;
  all.is_idle.wait_for(lock, kLastPatience, [&] { return !all.is_running; });
}

}  // namespace bucketwheel
