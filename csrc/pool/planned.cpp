// The pool with plans: places, regimes, steps.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "pool/pool_impl.h"

namespace bucketwheel {
namespace {

constexpr size_t kListedAcquires = 8;

std::string ask(const std::string& key, size_t size_bytes) {
  return "acquire of key '" + key + "' (" + std::to_string(size_bytes) + " bytes)";
}

}  // namespace

Arena::Key* PoolImpl::expect_not_busy(const Lease::State& state) const {
  if (state.key.empty()) {
    return nullptr;
  }
  Arena::Key* const known = arena == nullptr ? nullptr : arena->find(state.key);
  const Lease::State* holder = known == nullptr ? nullptr : static_cast<const Lease::State*>(known->owner);
  if (holder == nullptr && !live_keys.empty()) {
    const auto found = live_keys.find(state.key);
    holder = found == live_keys.end() ? nullptr : found->second;
  }
  if (holder != nullptr) {
    throw KeyBusy(ask(state.key, state.size_bytes) + ": another lease of the key is live: " + holder->describe());
  }
  return known;
}

const Arena::Place* PoolImpl::find_place(Lease::State& state, const Arena::Key* known) {
  const PoolPlan& plan = arena->plans()[regime];
  const Arena::Place* const place = known == nullptr ? nullptr : known->places[regime];
  const void* const owner = place == nullptr ? nullptr : arena->owner_of(*place);
  const bool fits = place != nullptr && state.size_bytes <= place->planned->size_bytes;
  if (!is_strict) {
    if (fits && owner == nullptr) {
      return place;
    }
    state.is_side = !state.key.empty();
    stats.divergences += state.is_side ? 1 : 0;
    if (state.is_side && divergence.empty()) {
      divergence = ask(state.key, state.size_bytes) + ": plan '" + plan.name + "' " +
                   (place == nullptr ? "does not have the key"
                    : !fits          ? "has " + std::to_string(place->planned->size_bytes) + " bytes for it"
                                     : "has a place for it, but another lease uses that: " +
                                           static_cast<const Lease::State*>(owner)->describe());
      is_divergence_new = true;
    }
    return nullptr;
  }
  const auto asked = [&state] { return ask(state.key, state.size_bytes); };
  if (place == nullptr) {
    throw UnknownKey(asked() + ": plan '" + plan.name + "' does not have the key");
  }
  if (!fits) {
    throw SizeExceedsPlan(asked() + ": plan '" + plan.name + "' has " + std::to_string(place->planned->size_bytes) +
                          " bytes for it");
  }
  const size_t position = positions[regime];
  if (!plan.order.empty() && (position == plan.order.size() || plan.order[position] != place->index)) {
    throw PlanDiverged(asked() + describe_step(regime));
  }
  if (owner != nullptr) {
    throw PlanDiverged(asked() + ": another lease uses bytes of its place: " +
                       static_cast<const Lease::State*>(owner)->describe() + describe_step(regime));
  }
  return place;
}

std::string PoolImpl::describe_step(size_t of_regime) const {
  const PoolPlan& plan = arena->plans()[of_regime];
  const size_t position = positions[of_regime];
  std::string text = "; plan '" + plan.name + "', acquire " + std::to_string(position) + " of step " +
                     std::to_string(stats.steps) + ": expected " +
                     (position < plan.order.size() ? "'" + plan.keys[plan.order[position]].key + "'" : "none") +
                     "; acquired before:";
  const size_t first = position - std::min(position, kListedAcquires);
  for (size_t i = first; i < position; ++i) {
    text += (i == first ? " '" : ", '") + plan.keys[plan.order[i]].key + "'";
  }
  return position == 0 ? text + " nothing" : text;
}

void Pool::adopt(std::vector<PoolPlan> plans, bool is_strict) {
  impl_->expect_same_process();
  auto arena = plans.empty() ? nullptr : std::make_unique<Arena>(std::move(plans), impl_->options.align_bytes);
  const size_t total_bytes = arena == nullptr ? 0 : arena->total_bytes();
  SlabRef slab = total_bytes == 0 ? nullptr : impl_->allocate(total_bytes);
  std::vector<EventRef> events;  // of the last uses of the arena before
  {
    std::lock_guard lock(impl_->mutex);
    std::vector<const Lease::State*> live;
    impl_->for_each_live([&live](const Lease::State& lease) {
      if (lease.place != nullptr) {
        live.push_back(&lease);
      }
    });
    if (!live.empty()) {
      throw PoolBusy("adopt: leases of the earlier plans are live: " + PoolImpl::list(live));
    }
    if (impl_->arena != nullptr) {
      events = impl_->arena->all_events();
    }
    std::swap(impl_->arena, arena);
    std::swap(impl_->arena_slab, slab);
    if (slab != nullptr) {
      impl_->leave(slab);
    }
    if (impl_->arena_slab != nullptr) {
      impl_->enter(impl_->arena_slab);
    }
    impl_->is_strict = is_strict;
    impl_->divergence.clear();
    impl_->is_divergence_new = false;
    impl_->regime = 0;
    impl_->positions.assign(impl_->arena == nullptr ? 0 : impl_->arena->plans().size(), 0);
    impl_->stats.planned_bytes = total_bytes;
    impl_->stats.planned_high_water_bytes = 0;
    impl_->stats.side_high_water_bytes = impl_->stats.side_live_bytes;
  }
  if (slab != nullptr) {
    PoolImpl::leak_unless_done(slab, events, {});  // a host wait: the memory goes back to the system
  }
}

void Pool::set_regime(const std::string& name) {
  std::lock_guard lock(impl_->mutex);
  std::string names;
  for (size_t i = 0; impl_->arena != nullptr && i < impl_->arena->plans().size(); ++i) {
    const PoolPlan& plan = impl_->arena->plans()[i];
    if (plan.name == name) {
      impl_->regime = i;
      return;
    }
    names += (names.empty() ? "'" : ", '") + plan.name + "'";
  }
  throw ValueError("regime '" + name + "': the pool has " + (names.empty() ? "no plans" : "the plans " + names));
}

std::string Pool::regime() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->arena == nullptr ? "" : impl_->arena->plans()[impl_->regime].name;
}

std::string Pool::take_divergence() {
  if (!impl_->is_divergence_new) {  // no lock in every acquire
    return {};
  }
  std::lock_guard lock(impl_->mutex);
  return impl_->is_divergence_new.exchange(false) ? impl_->divergence : "";
}

void Pool::end_step() {
  std::lock_guard lock(impl_->mutex);
  std::string diverged;
  for (size_t i = 0; i < impl_->positions.size(); ++i) {
    const PoolPlan& plan = impl_->arena->plans()[i];
    const bool is_begun = !plan.order.empty() && impl_->positions[i] != 0;
    if (impl_->is_strict && is_begun && impl_->positions[i] != plan.order.size()) {
      diverged = "the step ended" + impl_->describe_step(i);
    }
    impl_->positions[i] = 0;
  }
  impl_->stats.steps += 1;
  std::vector<const Lease::State*> leaked;
  impl_->for_each_live([&](const Lease::State& lease) {
    const Arena::Key* const known = impl_->arena == nullptr ? nullptr : impl_->arena->find(lease.key);
    const auto outlives = [](const Arena::Place* place) { return place != nullptr && place->planned->outlives_step; };
    if (known != nullptr && !std::ranges::any_of(known->places, outlives)) {
      leaked.push_back(&lease);
    }
  });
  if (!leaked.empty()) {
    throw LeaseLeak("the step ended while these leases were live: " + PoolImpl::list(leaked));
  }
  if (!diverged.empty()) {
    throw PlanDiverged(diverged);
  }
}

}  // namespace bucketwheel
