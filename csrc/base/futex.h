// Sleeping on a 32-bit word, within a process or across processes that map the same memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "base/deadline.h"

namespace bucketwheel {

enum class FutexScope : int { kPrivate = FUTEX_PRIVATE_FLAG, kShared = 0 };

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while `word` holds `expected`, until woken or until the deadline. May also wake up for no reason: the caller
// loops on its own condition. False only when the deadline has passed.
inline bool futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, const Deadline& deadline = {},
                       FutexScope scope = FutexScope::kPrivate) {
  timespec until{};
  if (deadline) {
    until = to_timespec(*deadline);
  }
  // WAIT_BITSET takes an absolute CLOCK_MONOTONIC time, so that spurious wake-ups do not stretch the wait.
  const long rc = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | static_cast<int>(scope), expected,
                          deadline ? &until : nullptr, nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(rc == -1 && errno == ETIMEDOUT);
}

inline void futex_wake(const std::atomic<uint32_t>& word, int count, FutexScope scope = FutexScope::kPrivate) {
  syscall(SYS_futex, &word, FUTEX_WAKE | static_cast<int>(scope), count, nullptr, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word, FutexScope scope = FutexScope::kPrivate) {
  futex_wake(word, INT_MAX, scope);
}

}  // namespace bucketwheel
