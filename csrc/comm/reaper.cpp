#include "comm/reaper.h"

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

  void run() {
    for (;;) {
      std::vector<Handle::Keepalive> now;  // freed without the lock
      std::lock_guard lock(mutex);
      if (has_stopped && !waiting.empty()) {
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

}  // namespace

void free_later(std::vector<Handle::Keepalive> keepalive) {
  if (keepalive.empty()) {
    return;
  }
  Reaper& all = per_process<Reaper>();
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
  Reaper& all = per_process<Reaper>();
  std::unique_lock lock(all.mutex);
  all.has_stopped = true;
  all.is_idle.wait_for(lock, kLastPatience, [&] { return !all.is_running; });
}

}  // namespace bucketwheel
