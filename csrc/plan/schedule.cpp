#include "plan/schedule.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

constexpr int64_t kMemoryWindows = 4;  // how long an unused parameter is still waited for
constexpr uint8_t kStored = 1, kVoid = 2, kHeld = 4, kOlder = 8;

bool flag(Flags flags, int param) { return !flags.empty() && flags[static_cast<size_t>(param)] != 0; }

constexpr uint8_t kDirty = 1, kComplete = 2;

// What notes look like: kDirty and kComplete, a byte for each parameter, one for each bucket (late), and the factors:
// nothing if all are 1, one double if they are all the same, else a double for each parameter.
struct Note {
  Note(std::string_view note, size_t params, size_t buckets) {
    const size_t fixed = 1 + params + buckets;
    const size_t tail = note.size() - std::min(note.size(), fixed);
    if (note.size() < fixed || (tail != 0 && tail != 8 && tail != 8 * params)) {
      throw Error("a rank sent notes of " + std::to_string(note.size()) + " bytes, for " + std::to_string(params) +
                  " parameters in " + std::to_string(buckets) +
                  " buckets; run the same version of bucketwheel on all ranks");
    }
    is_dirty = (note[0] & kDirty) != 0;
    is_complete = (note[0] & kComplete) != 0;
    flags = reinterpret_cast<const uint8_t*>(note.data()) + 1;
    factors = note.substr(fixed);
  }
  double factor(size_t param) const {
    double value = 1.0;
    if (!factors.empty()) {
      std::memcpy(&value, factors.data() + (factors.size() == 8 ? 0 : 8 * param), 8);
    }
    return value;
  }

  bool is_dirty;
  bool is_complete;
  const uint8_t* flags;  // of the parameters, then of the buckets
  std::string_view factors;
};

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}  // NaN equals NaN

void agree_on_flags(std::span<const Note> notes, size_t params, size_t buckets, WindowVerdict* agreement) {
  // Per parameter over the ranks: the flags that any rank has, those that all have, and whether a rank has stored a
  // gradient that is not void.
  std::vector<uint8_t> any(params, 0), all(params, 0xff), stays(params, 0), late(buckets, 0);
  for (const Note& note : notes) {
    const uint8_t* const flags = note.flags;  // no store below can change it
    for (size_t param = 0; param < params; ++param) {
      any[param] |= flags[param];
      all[param] &= flags[param];
      stays[param] |= static_cast<uint8_t>((flags[param] & (kStored | kVoid)) == kStored);
    }
    for (size_t bucket = 0; bucket < buckets; ++bucket) {
      late[bucket] |= flags[params + bucket];
    }
  }
  agreement->held.resize(params);
  agreement->common.resize(params);
  for (size_t param = 0; param < params; ++param) {
    agreement->held[param] = (any[param] & kHeld) != 0;
    agreement->common[param] = (all[param] & kHeld) != 0;
    agreement->is_uneven = agreement->is_uneven || agreement->held[param] != agreement->common[param];
    const bool is_void = (any[param] & kVoid) != 0;
    if ((is_void && stays[param]) || ((any[param] ^ all[param]) & kOlder) != 0) {
      agreement->conflicts.push_back(static_cast<int>(param));
    } else if (is_void) {
      agreement->voided.push_back(static_cast<int>(param));
    }
  }
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    if (late[bucket]) {
      agreement->late.push_back(static_cast<int>(bucket));
    }
  }
}

// [Note: whose factor] The agreed factor of every parameter, and the parameters that were scaled differently.
//
//   a rank                                                    its factor
//   put a gradient of the parameter into this window, or      counts: all of these must be the same. It is still to be
//   has an older one beside those of others                   multiplied; what the rank put in was divided by it
//   has no gradient of the parameter, or no part in the       does not count: the rank takes the others' factor, and
//   window                                                    applies the rest of its own to what its shard holds
void agree_on_factors(std::span<const Note> notes, size_t params, WindowVerdict* agreement) {
  const bool is_same = std::ranges::all_of(
      notes, [&](std::string_view factors) { return factors == notes.front().factors; }, &Note::factors);
  if (is_same && (notes.empty() || notes.front().factors.empty())) {
    return;
  }
  agreement->factors.assign(params, 1.0);
  for (size_t param = 0; param < params; ++param) {
    if (is_same) {
      agreement->factors[param] = notes.front().factor(param);
      continue;
    }
    bool is_said = false, is_apart = false;
    for (const Note& note : notes) {
      const uint8_t flags = note.flags[param];
      if (note.is_dirty != agreement->is_dirty || !(flags & kHeld) || !(flags & (kStored | kOlder))) {
        continue;
      }
      is_apart = is_apart || (is_said && !same_bits(note.factor(param), agreement->factors[param]));
      if (!is_said) {
        agreement->factors[param] = note.factor(param);
      }
      is_said = true;
    }
    if (is_apart) {
      agreement->scaled_apart.push_back(static_cast<int>(param));
    }
  }
}

}  // namespace

Schedule::Schedule(std::vector<std::vector<int>> buckets_of, int bucket_count, bool is_static)
    : buckets_of_(std::move(buckets_of)), params_of_(static_cast<size_t>(bucket_count)), is_static_(is_static) {
  for (size_t param = 0; param < buckets_of_.size(); ++param) {
    first_bucket_.push_back(buckets_of_[param].empty() ? bucket_count : buckets_of_[param].front());
    for (const int bucket : buckets_of_[param]) {
      params_of_.at(static_cast<size_t>(bucket)).push_back(static_cast<int>(param));
    }
  }
  last_held_.assign(buckets_of_.size(), 0);
  due_.assign(buckets_of_.size(), 1);
  begin_window();
}

void Schedule::begin_window() {
  const size_t count = buckets_of_.size();
  expected_.resize(count);
  for (size_t param = 0; param < count; ++param) {
    expected_[param] = is_learnt() ? static_own_[param] : last_held_[param] >= window_ - kMemoryWindows;
  }
  missing_.assign(params_of_.size(), 0);
  for (size_t bucket = 0; bucket < params_of_.size(); ++bucket) {
    for (const int param : params_of_[bucket]) {
      missing_[bucket] += expected_[param];
    }
  }
  arrived_.assign(count, 0);
  stored_.assign(count, 0);
  absent_.assign(count, 1);
  void_.assign(count, 0);
  late_.assign(params_of_.size(), 0);
  is_late_.assign(count, 0);
  next_ = 0;
  is_complete_ = is_dirty_ = false;
}

Actions Schedule::gradient(int param, bool replaces, bool launch) {
  Actions actions;
  is_dirty_ = true;
  if (replaces) {
    void_[param] = 1;
  }
  for (const int bucket : buckets_of_[param]) {
    if (void_[param] || bucket < next_) {
      late_[bucket] = is_late_[param] = 1;
      actions.stores.push_back({param, bucket, true, !replaces});
      deviating_ = deviating_ < 0 ? param : deviating_;
    } else {
      actions.stores.push_back({param, bucket, false, stored_[param] != 0});
    }
  }
  absent_[param] = absent_[param] && void_[param];
  stored_[param] = 1;
  if (launch) {
    count(param);
    actions.launches = launches(false);
  }
  return actions;
}

bool Schedule::arrive(int param, bool launch) {
  is_dirty_ = true;
  absent_[param] = 0;
  stored_[param] = 1;
  if (launch) {
    count(param);
  }
  return launch && next_ < static_cast<int>(params_of_.size()) && missing_[next_] == 0;
}

std::vector<LaunchAction> Schedule::ready() { return launches(false); }

void Schedule::count(int param) {
  if (++arrived_[param] == due_[param] && expected_[param]) {
    for (const int bucket : buckets_of_[param]) {
      --missing_[bucket];
    }
  }
}

std::vector<LaunchAction> Schedule::launches(bool all) {
  std::vector<LaunchAction> found;
  while (next_ < static_cast<int>(params_of_.size()) && (all || missing_[next_] == 0)) {
    LaunchAction launch{next_, {}, false};
    for (const int param : params_of_[next_]) {
      if (absent_[param]) {
        launch.absent.push_back(param);
      }
    }
    found.push_back(std::move(launch));
    ++next_;
  }
  return found;
}

std::vector<LaunchAction> Schedule::complete(std::span<const int> params) {
  if (!is_dirty_) {
    return {};
  }
  for (const int param : params) {
    if (expected_[param] && arrived_[param] < due_[param]) {
      for (const int bucket : buckets_of_[param]) {
        --missing_[bucket];
      }
      expected_[param] = 0;
    }
  }
  return launches(false);
}

std::vector<LaunchAction> Schedule::flush() {
  if (!is_dirty_) {
    return {};
  }
  is_complete_ = is_complete_ || next_ == static_cast<int>(params_of_.size());
  return launches(true);
}

void Schedule::discard() {
  if (is_dirty_) {
    std::fill(void_.begin(), void_.end(), uint8_t{1});
    std::fill(late_.begin(), late_.end(), uint8_t{0});
    std::fill(is_late_.begin(), is_late_.end(), uint8_t{0});
  }
}

std::vector<StoreAction> Schedule::drops(Flags held) const {
  std::vector<StoreAction> found;
  for (int param = 0; param < param_count(); ++param) {
    if (is_late_[param] && !flag(held, param)) {
      for (const int bucket : buckets_of_[param]) {
        if (late_[bucket]) {
          found.push_back({param, bucket, true, false});
        }
      }
    }
  }
  return found;
}

std::vector<uint8_t> Schedule::notes(Flags held, Flags older, std::span<const double> factors) const {
  std::vector<uint8_t> out;
  out.reserve(1 + buckets_of_.size() + late_.size() + 8);
  out.push_back(static_cast<uint8_t>(is_dirty_ * kDirty | is_complete_ * kComplete));
  for (int param = 0; param < param_count(); ++param) {
    const bool is_held = flag(held, param);
    const bool is_void = void_[param] || (stored_[param] && !is_held);
    const bool has_older = flag(older, param) && !is_void;
    out.push_back(
        static_cast<uint8_t>(stored_[param] * kStored | is_void * kVoid | is_held * kHeld | has_older * kOlder));
  }
  out.insert(out.end(), late_.begin(), late_.end());
  if (std::any_of(factors.begin(), factors.end(), [](double factor) { return factor != 1.0; })) {
    const bool is_one =
        std::all_of(factors.begin(), factors.end(), [&](double factor) { return same_bits(factor, factors.front()); });
    const auto* bytes = reinterpret_cast<const uint8_t*>(factors.data());
    out.insert(out.end(), bytes, bytes + 8 * (is_one ? 1 : factors.size()));
  }
  return out;
}

WindowVerdict Schedule::agree(std::span<const std::string_view> notes) const {
  WindowVerdict agreement;
  const size_t params = buckets_of_.size(), buckets = params_of_.size();
  agreement.is_dirty_on_all = agreement.is_complete = true;
  std::vector<Note> read;
  for (const std::string_view text : notes) {
    const Note& note = read.emplace_back(text, params, buckets);
    agreement.is_dirty = agreement.is_dirty || note.is_dirty;
    agreement.is_dirty_on_all = agreement.is_dirty_on_all && note.is_dirty;
    agreement.is_complete = agreement.is_complete && note.is_complete;
  }
  agree_on_flags(read, params, buckets, &agreement);
  agree_on_factors(read, params, &agreement);
  return agreement;
}

void Schedule::close(const WindowVerdict& agreement, std::vector<LaunchAction>* first,
                     std::vector<LaunchAction>* late) {
  if (!agreement.is_dirty) {
    return;
  }
  *first = launches(true);
  for (const int bucket : agreement.late) {
    late->push_back({bucket, {}, true});
  }
  ++window_;
  for (int param = 0; param < param_count(); ++param) {
    if (agreement.held[param]) {
      last_held_[param] = window_;
    }
    if (arrived_[param] && is_static_ && !is_learnt_) {
      due_[param] = arrived_[param];
    }
  }
  if (is_static_ && !is_learnt_ && agreement.is_dirty_on_all) {
    static_own_ = stored_;
    static_held_ = agreement.held;
    static_common_ = agreement.common;
    is_learnt_ = true;
  }
  deviating_ = -1;
  begin_window();
}

WindowVerdict Schedule::assume(Flags held, Flags older, std::span<const double> factors) const {
  const std::vector<uint8_t> own = notes(held, older, factors);
  const std::string_view view(reinterpret_cast<const char*>(own.data()), own.size());
  WindowVerdict agreement = agree({&view, 1});
  if (is_dirty_ && std::any_of(held.begin(), held.end(), [](uint8_t is_held) { return is_held != 0; })) {
    agreement.held = static_held_;
  }
  return agreement;
}

int Schedule::find_deviation(Flags held) const {
  const bool has_some = std::any_of(held.begin(), held.end(), [](uint8_t is_held) { return is_held != 0; });
  if (!is_learnt() || (!is_dirty_ && has_some)) {  // asked again for what an earlier window has brought
    return -1;
  }
  for (int param = 0; param < param_count(); ++param) {
    const bool has_gradient = stored_[param] && flag(held, param);
    if (deviating_ == param || has_gradient != (static_own_[param] != 0)) {
      return param;
    }
  }
  return -1;
}

}  // namespace bucketwheel
