#include "plan/residency.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bucketwheel {

using Kind = ResidencyEvent::Kind;

Residency::Residency(std::vector<uint8_t> stays, int prefetch)
    : stays_(std::move(stays)), prefetch_(prefetch), units_(stays_.size()), regimes_(1) {
  counts_.gathers.resize(units_.size());
  counts_.step_gathers.resize(units_.size());
}

void Residency::set_regime(int regime) {
  regimes_.resize(std::max(regimes_.size(), static_cast<size_t>(regime) + 1));
  regime_ = regime;
}

bool Residency::is_idle(int unit) const {
  const Unit& one = at(unit);
  return one.state != State::kAbsent && one.depth == 0 && one.holds == 0 && !one.keep && !one.spent;
}

int Residency::in_flight() const {
  return static_cast<int>(std::ranges::count(units_, State::kInFlight, &Unit::state));
}

const std::vector<ResidencyEvent>& Residency::record(int regime) const {
  static const std::vector<ResidencyEvent> none;
  const auto at = static_cast<size_t>(regime);
  return at < regimes_.size() ? regimes_[at].record : none;
}

void Residency::adopt_record(int regime, std::vector<ResidencyEvent> record) {
  set_regime(regime);
  now().record = std::move(record);
}

// The position behind `event` in the record: the next one, else the nearest further on, else the first.
void Residency::follow(const ResidencyEvent& event) {
  Regime& regime = now();
  if (regime.now.size() < kMostEvents) {
    regime.now.push_back(event);
  }
  const auto code = static_cast<uint64_t>(event.unit) << 4 | static_cast<uint64_t>(event.kind) << 2 |
                    static_cast<uint64_t>(event.in_backward) << 1 | static_cast<uint64_t>(event.keeps);
  hash_ = (hash_ ^ (code + 1)) * 0x9E3779B97F4A7C15ULL;
  hash_ ^= hash_ >> 29;
  if (regime.record.empty()) {
    return;
  }
  const auto begin = regime.record.begin();
  const auto next = begin + static_cast<std::ptrdiff_t>(regime.position);
  auto found = next;
  if (next == regime.record.end() || *next != event) {
    ++counts_.divergences;
    found = std::find(next, regime.record.end(), event);
    found = found == regime.record.end() ? std::find(begin, next, event) : found;
    if (found == next || found == regime.record.end()) {
      regime.is_lost = true;
      return;
    }
  }
  regime.is_lost = false;
  regime.position = static_cast<size_t>(found - begin) + 1;
}

void Residency::release(int unit, std::vector<int>* released) {
  Unit& one = at(unit);
  one.keep = one.spent = false;
  if (one.state == State::kAbsent || one.depth != 0 || one.holds != 0) {
    return;
  }
  counts_.wasted += one.state == State::kInFlight ? 1 : 0;
  one.state = State::kAbsent;
  released->push_back(unit);
}

// `by_record`: a checkpoint runs a forward again, perhaps that of a spent unit after others. Those go that the record does not
// need again in this backward.
void Residency::release_spent(int but, bool by_record, ResidencyActions* actions) {
  const Regime& regime = now();
  const auto is_needed = [&](int unit) {
    if (!by_record || regime.is_lost || regime.record.empty()) {
      return by_record;
    }
    const auto rest = regime.record.begin() + static_cast<std::ptrdiff_t>(regime.position);
    const auto found = std::find_if(rest, regime.record.end(), [&](const ResidencyEvent& event) {
      return event.kind == Kind::kBackwardEnd || event.unit == unit;
    });
    return found != regime.record.end() && found->kind != Kind::kBackwardEnd;
  };
  for (int unit = 1; unit < units(); ++unit) {
    if (unit != but && at(unit).spent && !at(unit).nests && !is_needed(unit)) {
      release(unit, &actions->release);
    }
  }
}

void Residency::gather(int unit, ResidencyActions* actions) {
  actions->gather.push_back(unit);
  ++counts_.gathers[static_cast<size_t>(unit)];
  if (std::exchange(is_new_step_, false)) {
    counts_.step_gathers.assign(units_.size(), 0);
  }
  ++counts_.step_gathers[static_cast<size_t>(unit)];
}

void Residency::need(int unit, ResidencyActions* actions) {
  Unit& one = at(unit);
  if (one.state == State::kAbsent) {
    gather(unit, actions);
  }
  if (one.state != State::kHere) {
    actions->wait = unit;
  }
  one.state = State::kHere;
}

void Residency::prefetch(ResidencyActions* actions) {
  const Regime& regime = now();
  if (regime.is_lost) {
    return;
  }
  int flying = in_flight();
  for (size_t at = regime.position; at < regime.record.size() && flying < prefetch_; ++at) {
    const ResidencyEvent& event = regime.record[at];
    if (event.needs() && this->at(event.unit).state == State::kAbsent) {
      this->at(event.unit).state = State::kInFlight;
      gather(event.unit, actions);
      ++flying;
    }
  }
}

// Whether the record needs the unit among the next units.
bool Residency::is_soon(int unit) {
  const Regime& regime = now();
  std::vector<int> seen;
  for (size_t at = regime.position; !regime.is_lost && at < regime.record.size(); ++at) {
    const ResidencyEvent& event = regime.record[at];
    if (!event.needs() || event.unit == 0 || std::ranges::find(seen, event.unit) != seen.end()) {
      continue;
    }
    if (event.unit == unit) {
      return true;
    }
    seen.push_back(event.unit);
    if (static_cast<int>(seen.size()) >= std::max(prefetch_, 1)) {
      break;
    }
  }
  return false;
}

ResidencyActions Residency::event(const ResidencyEvent& event) {
  ResidencyActions actions;
  follow(event);
  Unit& one = at(event.unit);
  switch (event.kind) {
    case Kind::kForward:
    case Kind::kBackward:
      for (int other = 1; event.kind == Kind::kForward && other < units(); ++other) {
        at(other).nests = at(other).nests || (other != event.unit && at(other).depth != 0);
      }
      if (event.unit != 0) {
        release_spent(event.unit, event.kind == Kind::kForward && event.in_backward, &actions);
      }
      need(event.unit, &actions);
      if (event.kind == Kind::kForward) {
        ++one.depth;
        one.keep = one.keep && !event.keeps;
      } else {
        one.spent = one.depth == 0;
        one.keep = false;
      }
      prefetch(&actions);
      break;
    case Kind::kForwardEnd:
      one.depth = std::max(one.depth - 1, 0);
      if (one.depth != 0 || one.spent) {
        break;
      }
      if (event.in_backward || event.pins ||
          (event.keeps && (event.unit == 0 || stays_[static_cast<size_t>(event.unit)] != 0))) {
        one.keep = true;
      } else if (event.unit != 0 && is_soon(event.unit)) {
        one.keep = event.keeps;
      } else if (!one.keep && (event.keeps || stays_[static_cast<size_t>(event.unit)] == 0)) {
        release(event.unit, &actions.release);
      }
      break;
    case Kind::kBackwardEnd:
      for (int unit = 0; unit < units(); ++unit) {
        if (at(unit).spent || at(unit).keep) {
          release(unit, &actions.release);
        }
        at(unit).nests = false;
      }
      break;
  }
  return actions;
}

ResidencyActions Residency::hold(int unit) {
  ResidencyActions actions;
  need(unit, &actions);
  ++at(unit).holds;
  return actions;
}

void Residency::let_go(int unit, bool keeps, std::vector<int>* released) {
  Unit& one = at(unit);
  one.holds = std::max(one.holds - 1, 0);
  one.keep = one.keep || keeps;
  if (is_idle(unit)) {
    release(unit, released);
  }
}

void Residency::evict(int unit) {
  std::vector<int> released;
  at(unit).depth = at(unit).holds = 0;
  release(unit, &released);
}

bool Residency::end_pass() {
  Regime& regime = now();
  regime.position = 0;
  regime.is_lost = false;
  const bool is_new =
      !regime.now.empty() && (regime.record.empty() || (regime.now != regime.record && regime.now == regime.candidate));
  if (is_new) {
    regime.record = regime.now;
  }
  if (!regime.now.empty()) {
    regime.candidate = std::exchange(regime.now, {});
  }
  return is_new;
}

void Residency::forget_events() {
  for (Regime& regime : regimes_) {
    regime.now.clear();
  }
}

bool Residency::end_step(std::vector<int>* released) {
  for (int unit = 0; unit < units(); ++unit) {
    at(unit).depth = at(unit).holds = 0;
    at(unit).nests = false;
    release(unit, released);
  }
  bool is_new = false;
  const int regime = regime_;
  for (regime_ = 0; regime_ < static_cast<int>(regimes_.size()); ++regime_) {
    is_new = end_pass() || is_new;
  }
  regime_ = regime;
  hash_ = 0;
  is_new_step_ = true;
  return is_new;
}

std::vector<std::vector<std::pair<int, int>>> residency_intervals(const std::vector<uint8_t>& stays, int prefetch,
                                                                  const std::vector<ResidencyEvent>& record) {
  Residency residency(stays, prefetch);
  residency.adopt_record(0, record);
  std::vector<std::vector<std::pair<int, int>>> intervals(stays.size());
  const auto end = [&](const std::vector<int>& units, int time) {
    for (const int unit : units) {
      intervals[static_cast<size_t>(unit)].back().second = time;
    }
  };
  for (int time = 0; time < static_cast<int>(record.size()); ++time) {
    const ResidencyActions actions = residency.event(record[static_cast<size_t>(time)]);
    end(actions.release, time);
    for (const int unit : actions.gather) {
      auto& of_unit = intervals[static_cast<size_t>(unit)];
      if (of_unit.empty() || of_unit.back().second != time) {
        of_unit.emplace_back(time, 0);
      }
      of_unit.back().second = static_cast<int>(record.size());
    }
  }
  return intervals;
}

}  // namespace bucketwheel
