#include "comm/reaper.h"

#include <atomic>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

#include "base/fork.h"

namespace bucketwheel {
namespace {

struct Reaper {
  std::mutex mutex;
  std::vector<Handle::Keepalive> waiting;
  bool is_running = false;
  uint64_t fork_generation = 0;

  void run() {
    for (;;) {
      std::vector<Handle::Keepalive> now;  // freed without the lock
      std::lock_guard lock(mutex);
      if (waiting.empty()) {
        is_running = false;
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
  all.waiting.insert(all.waiting.end(), std::make_move_iterator(keepalive.begin()),
                     std::make_move_iterator(keepalive.end()));
  if (!all.is_running) {
    std::thread([&all] { all.run(); }).detach();
    all.is_running = true;
  }
}

}  // namespace bucketwheel
