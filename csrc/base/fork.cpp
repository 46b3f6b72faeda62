#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace bucketwheel {
namespace {

std::atomic<uint64_t>& count() {
  // Never freed. Initialised by the first caller, before any object that compares generations exists.
  static std::atomic<uint64_t>* const forks = [] {
    auto* made = new std::atomic<uint64_t>(0);
    pthread_atfork(nullptr, nullptr, [] { count().fetch_add(1, std::memory_order_relaxed); });
    return made;
  }();
  return *forks;
}

}  // namespace

uint64_t fork_generation() { return count().load(std::memory_order_relaxed); }

}  // namespace bucketwheel
