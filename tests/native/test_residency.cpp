// plan/residency.h: random steps, followed and not. Run by test_native.py.
// needs: base plan
#include "plan/residency.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

using namespace bucketwheel;
using Kind = ResidencyEvent::Kind;

namespace {

constexpr int kUnits = 6;

// What a step of a model does: forwards in `order`, and backward through them; with `checkpoints` each forward again.
std::vector<ResidencyEvent> step_of(const std::vector<int>& order, bool checkpoints) {
  std::vector<ResidencyEvent> out{{Kind::kForward, 0, false, true}};
  for (const int unit : order) {
    out.push_back({Kind::kForward, unit, false, true});
    out.push_back({Kind::kForwardEnd, unit, false, true});
  }
  out.push_back({Kind::kForwardEnd, 0, false, true});
  out.push_back({Kind::kBackward, 0, true, false});
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    out.push_back({Kind::kBackward, *unit, true, false});
    if (checkpoints) {
      out.push_back({Kind::kForward, *unit, true, true});
      out.push_back({Kind::kForwardEnd, *unit, true, true});
    }
  }
  out.push_back({Kind::kBackwardEnd, 0, true, false});
  return out;
}

std::vector<int> shuffled(std::mt19937_64& random, int count) {
  std::vector<int> order;
  for (int unit = 1; unit <= count; ++unit) {
    order.push_back(unit);
  }
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Runs events, and holds that what is needed is here, that what goes was there, and that no more is ahead than `prefetch`.
class Follower {
 public:
  Follower(std::vector<uint8_t> stays, int prefetch)
      : machine(std::move(stays), prefetch), prefetch_(prefetch), is_gathered_(kUnits, false) {}

  void run(const std::vector<ResidencyEvent>& events) {
    for (const ResidencyEvent& event : events) {
      const ResidencyActions actions = machine.event(event);
      for (const int unit : actions.release) {
        CHECK(is_gathered_[static_cast<size_t>(unit)] && !machine.is_here(unit));
        is_gathered_[static_cast<size_t>(unit)] = false;
      }
      for (const int unit : actions.gather) {
        CHECK(!is_gathered_[static_cast<size_t>(unit)]);
        is_gathered_[static_cast<size_t>(unit)] = true;
        ++gathers;
      }
      CHECK(!event.needs() || machine.is_here(event.unit));
      CHECK(machine.in_flight() <= prefetch_);
      most = std::max(most, static_cast<int>(std::ranges::count(is_gathered_, true)));
    }
  }
  bool end_step() {
    std::vector<int> released;
    const bool is_new = machine.end_step(&released);
    for (const int unit : released) {
      CHECK(is_gathered_[static_cast<size_t>(unit)]);
      is_gathered_[static_cast<size_t>(unit)] = false;
    }
    CHECK(std::ranges::count(is_gathered_, true) == 0);
    return is_new;
  }

  Residency machine;
  int gathers = 0;
  int most = 0;  // units that were gathered at once, the root among them

 private:
  const int prefetch_;
  std::vector<bool> is_gathered_;
};

}  // namespace

TEST(a_recorded_step_is_gathered_ahead_and_in_bounds) {
  for (const bool checkpoints : {false, true}) {
    for (int prefetch = 0; prefetch < 4; ++prefetch) {
      for (const uint8_t stays : {uint8_t{0}, uint8_t{1}}) {
        const std::vector<ResidencyEvent> step = step_of({1, 2, 3, 4, 5}, checkpoints);
        Follower follower(std::vector<uint8_t>(kUnits, stays), prefetch);
        follower.run(step);
        CHECK(follower.gathers == (stays ? 6 : 11));
        CHECK(follower.end_step());
        for (int again = 0; again < 3; ++again) {
          follower.gathers = follower.most = 0;
          follower.run(step);
          // The units that are needed next after their forward stay: one, or as many as are gathered ahead.
          CHECK(follower.gathers == (stays ? 6 : 11 - std::max(prefetch, 1)));
          CHECK(stays != 0 || follower.most <= 1 + 1 + (prefetch == 1 ? 1 : prefetch == 0 ? 0 : 2 * prefetch));
          CHECK(!follower.end_step());
        }
        CHECK(follower.machine.counts().divergences == 0 && follower.machine.counts().wasted == 0);
      }
    }
  }
}

TEST(the_intervals_of_a_record_are_what_a_step_does) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 500; ++trial) {
    const int prefetch = static_cast<int>(random() % 4);
    std::vector<uint8_t> stays(kUnits);
    for (uint8_t& stay : stays) {
      stay = random() % 2;
    }
    const std::vector<ResidencyEvent> step = step_of(shuffled(random, 5), random() % 2 == 0);
    Residency machine(stays, prefetch);
    machine.adopt_record(0, step);
    std::vector<std::vector<std::pair<int, int>>> seen(kUnits);
    for (int time = 0; time < static_cast<int>(step.size()); ++time) {
      const ResidencyActions actions = machine.event(step[static_cast<size_t>(time)]);
      for (const int unit : actions.release) {
        seen[static_cast<size_t>(unit)].back().second = time;
      }
      for (const int unit : actions.gather) {
        auto& of_unit = seen[static_cast<size_t>(unit)];
        if (!of_unit.empty() && of_unit.back().second == time) {
          of_unit.back().second = static_cast<int>(step.size());
        } else {
          of_unit.emplace_back(time, static_cast<int>(step.size()));
        }
      }
    }
    for (const auto& of_unit : seen) {
      for (size_t at = 1; at < of_unit.size(); ++at) {
        CHECK(of_unit[at - 1].second < of_unit[at].first);  // they do not touch
      }
    }
    CHECK(seen == residency_intervals(stays, prefetch, step));
    CHECK(machine.counts().divergences == 0);
  }
}

TEST(ten_thousand_random_steps_serve_every_unit_whatever_the_record_says) {
  std::mt19937_64 random(11);
  int64_t divergences = 0;
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<uint8_t> stays(kUnits, static_cast<uint8_t>(trial % 2));
    Follower follower(stays, trial % 4);
    for (int step = 0; step < 20; ++step) {
      std::vector<ResidencyEvent> events =
          step_of(shuffled(random, 1 + static_cast<int>(random() % 5)), random() % 3 == 0);
      if (random() % 8 == 0) {  // a step that fails
        events.resize(random() % events.size());
      }
      follower.run(events);
      follower.end_step();
    }
    divergences += follower.machine.counts().divergences;
  }
  CHECK(divergences > 10000);
}

TEST(a_step_that_is_another_one_for_good_replaces_the_record_and_the_position_is_found_again) {
  Follower follower(std::vector<uint8_t>(kUnits, 0), 1);
  const std::vector<ResidencyEvent> first = step_of({1, 2, 3, 4, 5}, false), other = step_of({1, 3, 4, 5}, false);
  follower.run(first);
  CHECK(follower.end_step());
  follower.run(other);
  const int64_t once = follower.machine.counts().divergences;
  CHECK(once > 0 && once <= 2);  // where unit 2 is left out, forward and backward
  CHECK(!follower.end_step());
  follower.run(other);
  CHECK(follower.end_step());
  const int64_t before = follower.machine.counts().divergences;
  follower.run(other);
  CHECK(follower.machine.counts().divergences == before);
}

TEST(a_unit_that_calls_another_stays_until_the_end_of_backward) {
  Follower follower(std::vector<uint8_t>(kUnits, 0), 1);
  const std::vector<ResidencyEvent> step{{Kind::kForward, 1, false, true},    {Kind::kForward, 2, false, true},
                                         {Kind::kForwardEnd, 2, false, true}, {Kind::kForwardEnd, 1, false, true},
                                         {Kind::kBackward, 1, true},          {Kind::kBackward, 2, true}};
  for (int again = 0; again < 3; ++again) {
    follower.run(step);
    CHECK(follower.machine.is_here(1) && follower.machine.is_here(2));
    follower.run({{Kind::kBackwardEnd, 0, true}});
    CHECK(!follower.machine.is_here(1) && !follower.machine.is_here(2));
    follower.end_step();
  }
}

TEST(the_order_has_a_hash_of_its_own) {
  std::mt19937_64 random(3);
  std::vector<uint64_t> hashes;
  std::vector<int> order{1, 2, 3, 4, 5};
  do {
    Residency machine(std::vector<uint8_t>(kUnits, 0), 1);
    for (const ResidencyEvent& event : step_of(order, false)) {
      machine.event(event);
    }
    hashes.push_back(machine.hash());
  } while (std::ranges::next_permutation(order).found);
  std::ranges::sort(hashes);
  CHECK(hashes.size() == 120 && std::ranges::adjacent_find(hashes) == hashes.end());
}

TEST(a_held_unit_stays_until_it_is_let_go) {
  Residency machine(std::vector<uint8_t>(kUnits, 0), 1);
  const ResidencyActions actions = machine.hold(3);
  CHECK(actions.gather == std::vector<int>{3} && machine.is_here(3));
  for (const ResidencyEvent& event : step_of({1, 2, 3}, false)) {
    machine.event(event);
  }
  CHECK(machine.is_here(3) && !machine.is_here(2));
  std::vector<int> released;
  machine.let_go(3, false, &released);
  CHECK(released == std::vector<int>{3} && !machine.is_here(3));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
