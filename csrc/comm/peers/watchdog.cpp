#include "comm/peers/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kPeriod{100};

class Looked final : public Watch {
 public:
  explicit Looked(std::function<void()> look) : look_(std::move(look)) {}
  void stop() noexcept override {
    std::function<void()> dropped;
    std::lock_guard lock(mutex_);
    dropped.swap(look_);
  }
  void run() {
    std::lock_guard lock(mutex_);
    if (look_) {
      look_();
    }
  }

 private:
  std::mutex mutex_;
  std::function<void()> look_;
};

// What watch() gives out; the watchdog has the Looked for as long as it looks.
struct Owner {
  std::shared_ptr<Looked> looked;
  MadeIn process{};
  ~Owner() {
    if (process.is_foreign()) {
      new (std::nothrow) std::shared_ptr<Looked>(std::move(looked));  // its thread may hold a lock, in the parent
    } else {
      looked->stop();
    }
  }
};

struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Looked>> watched;
  bool is_running = false;
  bool is_woken = false;

  void run();
};

void Watchdog::run() {
  std::vector<std::shared_ptr<Looked>> alive;
  std::unique_lock lock(mutex);
  for (;;) {
    std::erase_if(watched, [](const auto& one) { return one.expired(); });
    if (watched.empty()) {
      is_running = false;
      return;
    }
    for (const auto& one : watched) {
      if (auto held = one.lock()) {
        alive.push_back(std::move(held));
      }
    }
    is_woken = false;
    lock.unlock();
    for (const auto& one : alive) {
      one->run();
    }
    alive.clear();
    lock.lock();
    changed.wait_for(lock, kPeriod, [this] { return is_woken; });
  }
}

}  // namespace

std::shared_ptr<Watch> watch(std::function<void()> look) {
  auto made = std::make_shared<Looked>(std::move(look));
  Watchdog& dog = per_process<Watchdog>();
  std::lock_guard lock(dog.mutex);
  dog.watched.push_back(made);
  if (!dog.is_running) {
    std::thread([&dog] {
      own_cuda_thread();
      dog.run();
    }).detach();
    dog.is_running = true;
  }
  return {std::make_shared<Owner>(made), made.get()};
}

void wake_watchdog() {
  Watchdog& dog = per_process<Watchdog>();
  {
    std::lock_guard lock(dog.mutex);
    dog.is_woken = true;
  }
  dog.changed.notify_all();
}

}  // namespace bucketwheel
