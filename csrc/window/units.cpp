#include "window/units.h"

#include <chrono>
#include <utility>

#include "base/error.h"

namespace bucketwheel {

Units::Units(CommRef comm, std::vector<UnitSpec> units, const std::vector<uint8_t>& stays, int prefetch,
             UnitCallbacks callbacks)
    : comm_(std::move(comm)), machine_(stays, prefetch), callbacks_(std::move(callbacks)) {
  for (UnitSpec& unit : units) {
    units_.push_back({std::move(unit)});
  }
}

void Units::set_plan(PoolPlan plan, std::vector<int> numbers, const StreamRef& stream) {
  for (const Unit& unit : units_) {
    BW_EXPECTS(!unit.turn, "unit '" + unit.spec.name + "' is gathered while its memory is planned");
  }
  if (places_ != nullptr) {
    places_->release(stream);
  }
  numbers_ = std::move(numbers);
  places_ = std::make_unique<Places>(comm_->pool(), comm_->pool(), std::move(plan), stream);
}

void Units::step(const ResidencyEvent& event, const StreamRef& stream) {
  const bool is_there = machine_.is_here(event.unit) || machine_.is_in_flight(event.unit);
  if (event.needs() && !is_there && machine_.record(machine_.regime()).empty()) {
    callbacks_.agree(event.unit, event.kind == ResidencyEvent::Kind::kForward ? "forward" : "backward");
  }
  carry_out(machine_.event(event), stream);
  if (event.needs() && at(event.unit).handle != nullptr) {  // of hold()
    wait(event.unit, stream);
  }
}

bool Units::end_step(const StreamRef& stream) {
  for (int unit = 0; unit < count(); ++unit) {
    if (at(unit).handle != nullptr) {  // it reads the shards, which are written next
      wasted_bytes_ += machine_.is_in_flight(unit) ? at(unit).spec.size_bytes : 0;
      wait(unit, stream);
    }
  }
  std::vector<int> released;
  const bool is_new = machine_.end_step(&released);
  release(released, stream);
  return is_new;
}

HandleRef Units::hold(int unit, const StreamRef& stream, const StreamRef& in) {
  const bool is_here = machine_.is_here(unit);
  if (!is_here && !machine_.is_in_flight(unit)) {
    callbacks_.agree(unit, "unshard");
  }
  ResidencyActions actions = machine_.hold(unit);
  actions.wait = -1;
  carry_out(actions, stream, in);
  if (!is_here) {
    callbacks_.assign(unit, true);
  }
  return at(unit).gathered;
}

void Units::let_go(int unit, bool keeps, const StreamRef& stream) {
  std::vector<int> released;
  machine_.let_go(unit, keeps, &released);
  release(released, stream);
}

void Units::carry_out(const ResidencyActions& actions, const StreamRef& stream, const StreamRef& in) {
  release(actions.release, stream);
  for (const int unit : actions.gather) {
    gather(unit, stream, in);
  }
  if (actions.wait >= 0) {
    wait(actions.wait, stream);
    callbacks_.assign(actions.wait, true);
  }
}

void Units::release(const std::vector<int>& units, const StreamRef& stream) {
  for (const int unit : units) {
    Unit& one = at(unit);
    EventRef after;
    if (one.handle != nullptr) {  // nobody has waited for it
      wasted_bytes_ += one.spec.size_bytes;
      after = one.handle->event();
    }
    if (stream != nullptr) {
      if (after != nullptr) {
        stream->wait(after);
      }
      after = stream->record();
    }
    callbacks_.assign(unit, false);
    if (comm_->pool()->is_poisoned() && one.handle == nullptr) {
      comm_->pool()->device().fill(one.turn.data, kPoison, one.turn.size_bytes, stream.get());
      after = stream == nullptr ? nullptr : stream->record();
    }
    one.handle = nullptr;
    places_->leave(one.turn, std::move(after));
  }
}

void Units::gather(int unit, const StreamRef& stream, const StreamRef& in) {
  Unit& one = at(unit);
  IssueOptions options;
  options.stream = in;
  options.caller = stream;
  const auto index = static_cast<size_t>(machine_.regime() * count() + unit);
  const int number = index < numbers_.size() ? numbers_[index] : -1;
  if (number >= 0 && !places_->is_free(number)) {
    make_free(number, stream);
  }
  if (number >= 0 && places_->is_free(number)) {
    one.turn = places_->enter(number, &options.after);
  } else {
    one.turn = places_->enter_side(one.spec.size_bytes, "unit " + one.spec.name, stream);
  }
  const std::shared_ptr<void> owner = one.turn.side != nullptr ? one.turn.side->slab() : one.turn.owner;
  try {
    const std::shared_ptr<const Request> request = callbacks_.bind(unit, one.turn.data, owner);
    callbacks_.aside([&] { one.handle = one.gathered = request->start(std::move(options)); });
  } catch (...) {
    machine_.evict(unit);
    places_->leave(one.turn, stream == nullptr ? nullptr : stream->record());
    throw;
  }
}

void Units::make_free(int number, const StreamRef& stream) {
  for (int other = 0; other < count(); ++other) {
    if (machine_.is_idle(other) && places_->shares_bytes(number, at(other).turn)) {
      machine_.evict(other);
      release({other}, stream);
    }
  }
}

void Units::wait(int unit, const StreamRef& stream) {
  Unit& one = at(unit);
  if (one.handle == nullptr) {
    return;
  }
  const HandleRef handle = std::exchange(one.handle, nullptr);
  const auto begin = std::chrono::steady_clock::now();
  callbacks_.aside([&] { handle->wait(stream.get()); });
  one.waited_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace bucketwheel
