#include "comm/public_call.h"

#include <algorithm>
#include <cstdio>

#include "base/deadline.h"

namespace bucketwheel {

void PublicCall::enter(std::string_view name) {
  if (depth_++ == 0) {
    for (size_t i = 0; i + 1 < name_.size(); ++i) {
      name_[i].store(i < name.size() ? name[i] : '\0', std::memory_order_relaxed);
    }
  }
}

std::string PublicCall::name() const {
  std::string out;
  for (size_t i = 0; name_[i] != '\0'; ++i) {
    out += name_[i];
  }
  return out;
}

std::string PublicCall::text() const {
  const std::string called = name();
  return called.empty() ? "" : (depth_ == 0 ? "has finished " : "is in ") + called;
}

std::string missing_text(std::span<const Missing> missing, const std::string& call) {
  constexpr size_t kShown = 8;
  std::string text = ". Not arrived:";
  bool have_all_called = true;
  for (const Missing& one : missing.first(std::min(missing.size(), kShown))) {
    const bool has_called = one.is_in_it || one.call == "is in " + call;
    have_all_called = have_all_called && has_called;
    text += (text.back() == ':' ? " rank " : ", rank ") + std::to_string(one.rank) + " (";
    const char* const again = one.call == "has finished " + call ? " again" : "";
    for (const std::string& fact : {one.who, one.call, has_called ? "" : "has not called " + call + again}) {
      text += fact.empty() ? "" : fact + ", ";
    }
    text += one.last + ")";
  }
  text += missing.size() > kShown ? " and " + std::to_string(missing.size() - kShown) + " more" : "";
  return text + (have_all_called ? "" : ": call it on all ranks");
}

bool Reports::is_due(std::chrono::nanoseconds waited) const {
  const int64_t since_last = Clock::now().time_since_epoch().count() - last_ns_;
  return waited.count() >= first_ns_ && since_last >= waited.count() / 2;
}

void Reports::tell(std::chrono::nanoseconds waited, std::chrono::nanoseconds limit, const std::string& who,
                   const std::string& what) {
  using Seconds = std::chrono::duration<double>;
  const int64_t now = Clock::now().time_since_epoch().count();
  int64_t last = last_ns_;
  const bool is_mine = now - last >= waited.count() / 2 && last_ns_.compare_exchange_strong(last, now);
  if (is_mine && !what.empty()) {
    std::fprintf(stderr, "[bucketwheel %s] has waited %.1f s in %s. It gives up after %.0f s\n", who.c_str(),
                 Seconds(waited).count(), what.c_str(), Seconds(limit).count());
  }
}

}  // namespace bucketwheel
