// Residency: when the parameters of each unit are gathered and when they are let go. Pure integers: events in, actions out.
//
// A *unit* is a set of parameters that come and go together; unit 0 is the root, of what belongs to no other. Its events are
// those of the modules that hold it. In the first step of a regime (train, eval, ...) units are gathered when they are
// needed, and the events are recorded. From then on units are gathered ahead, by the position in the record: those that are
// needed next and are not here, as long as fewer than `prefetch` are gathered and not yet waited for.
//
// A unit is let go
//   - at the end of its forward, unless it stays until its backward, or is one of the next `prefetch` (at least one) units
//     that the record needs;
//   - once its backward has begun, when another unit is needed: by then autograd has run all of its nodes, which are later
//     in the forward than any of the other unit (but where that unit's forward was inside of its own);
//   - at the end of backward, and before a step.
// The root stays from the first forward to the end of backward.
//
// An event that the record does not have next is a *divergence*: the unit is gathered when it is needed, and nothing ahead,
// until an event comes that the record has; the record goes on there. A step that is like the one before and unlike the
// record replaces it.
//
// The memory plan is made by running the same object over the record: residency_intervals().
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bucketwheel {

struct ResidencyEvent {
  enum class Kind : uint8_t {
    kForward,      // the forward of a module of the unit begins, or such a module needs it
    kForwardEnd,   // of a module that was begun
    kBackward,     // autograd comes to an output of the unit
    kBackwardEnd,  // the whole backward is over; of no unit
  };
  Kind kind = Kind::kForward;
  int unit = 0;
  bool in_backward = false;  // a forward that a checkpoint runs again
  bool keeps = false;        // of a forward: a backward may follow
  bool pins = false;         // of kForwardEnd: nothing will tell of its backward, so it stays until the end of that
  bool operator==(const ResidencyEvent&) const = default;
  bool needs() const { return kind == Kind::kForward || kind == Kind::kBackward; }
};

struct ResidencyActions {
  std::vector<int> release;  // first
  std::vector<int> gather;   // then
  int wait = -1;             // last: this unit is used from now on
};

struct ResidencyCounts {
  int64_t divergences = 0;
  int64_t wasted = 0;                 // gathers that nobody waited for
  std::vector<int64_t> gathers;       // by unit
  std::vector<int64_t> step_gathers;  // the same since the last step, or in it
};

// Not thread-safe.
class Residency {
 public:
  // `stays`: by unit, whether it stays between its forward and its backward.
  Residency(std::vector<uint8_t> stays, int prefetch);

  // Regimes are numbered by their first use. The position in another one stays.
  void set_regime(int regime);
  int regime() const { return regime_; }
  ResidencyActions event(const ResidencyEvent& event);
  // The unit is gathered, and stays until let_go(), whatever events come.
  ResidencyActions hold(int unit);
  // It stays on, if it `keeps`, as after a forward.
  void let_go(int unit, bool keeps, std::vector<int>* released);
  // An idle unit's memory is needed, or its gather could not be started.
  void evict(int unit);
  // A pass of the regime is over: the next one begins with the record. Whether the record is new.
  bool end_pass();
  // What has come since the last step is not recorded.
  void forget_events();
  // A step, or whatever else writes to parameters: all units go, and the passes of all regimes are over.
  bool end_step(std::vector<int>* released);

  bool is_here(int unit) const { return at(unit).state == State::kHere; }
  // Its backward has begun, and no other unit has been needed since.
  bool is_spent(int unit) const { return at(unit).spent; }
  bool is_in_flight(int unit) const { return at(unit).state == State::kInFlight; }
  bool is_idle(int unit) const;
  int in_flight() const;
  // Of the regime: empty before its first step is over.
  const std::vector<ResidencyEvent>& record(int regime) const;
  // Equal on ranks that have seen the same events in this step.
  uint64_t hash() const { return hash_; }
  const ResidencyCounts& counts() const { return counts_; }
  int units() const { return static_cast<int>(units_.size()); }
  void adopt_record(int regime, std::vector<ResidencyEvent> record);

 private:
  static constexpr size_t kMostEvents = size_t{1} << 20;  // of a pass that never ends
  enum class State : uint8_t { kAbsent, kInFlight, kHere };
  struct Unit {
    State state = State::kAbsent;
    int depth = 0;       // forwards that go on
    int holds = 0;       // hold() less let_go()
    bool keep = false;   // until its backward, or the end of backward
    bool spent = false;  // its backward has begun: goes when another unit is needed
    bool nests = false;  // another unit's forward was inside of its own: stays until the end of backward
  };
  struct Regime {
    std::vector<ResidencyEvent> record, candidate, now;
    size_t position = 0;
    bool is_lost = false;  // from an event that the record does not have until one that it has
  };
  Unit& at(int unit) { return units_.at(static_cast<size_t>(unit)); }
  const Unit& at(int unit) const { return units_.at(static_cast<size_t>(unit)); }
  Regime& now() { return regimes_.at(static_cast<size_t>(regime_)); }

  void follow(const ResidencyEvent& event);
  void gather(int unit, ResidencyActions* actions);
  void need(int unit, ResidencyActions* actions);
  void prefetch(ResidencyActions* actions);
  bool is_soon(int unit);
  void release(int unit, std::vector<int>* released);
  void release_spent(int but, bool by_record, ResidencyActions* actions);

  const std::vector<uint8_t> stays_;
  const int prefetch_;
  std::vector<Unit> units_;
  std::vector<Regime> regimes_;
  int regime_ = 0;
  uint64_t hash_ = 0;
  bool is_new_step_ = false;  // from the end of a step to the next gather
  ResidencyCounts counts_;
};

// Of each unit, from when to when it has memory if a step is `record`: half-open, in events.
std::vector<std::vector<std::pair<int, int>>> residency_intervals(const std::vector<uint8_t>& stays, int prefetch,
                                                                  const std::vector<ResidencyEvent>& record);

}  // namespace bucketwheel
