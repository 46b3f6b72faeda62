// Deadlines: absolute times on the monotonic clock, or none.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <optional>

namespace bucketwheel {

using Clock = std::chrono::steady_clock;
// No value: wait for ever.
using Deadline = std::optional<Clock::time_point>;

// `seconds` from now. Negative counts as 0; anything longer than a century as no deadline.
inline Deadline deadline_in(double seconds) {
  constexpr double kCentury_s = 100.0 * 365.0 * 86400.0;
  if (!(seconds < kCentury_s)) {
    return std::nullopt;
  }
  return Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(std::fmax(seconds, 0.0) * 1e9));
}

inline bool has_passed(const Deadline& deadline) { return deadline && Clock::now() >= *deadline; }

// The earlier of the two.
inline Clock::time_point earlier(const Deadline& deadline, Clock::time_point time) {
  return deadline ? std::min(*deadline, time) : time;
}

// As CLOCK_MONOTONIC time, the form the kernel takes.
inline timespec to_timespec(Clock::time_point time) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace bucketwheel
