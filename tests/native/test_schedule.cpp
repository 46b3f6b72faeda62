// plan/schedule.h: W state machines and a recording communicator over random schedules. Run by test_native.py.
// needs: base plan
// runs: plain address
// slow: address
#include "plan/schedule.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace bucketwheel;

namespace {

using Key = std::pair<int, int>;  // parameter, bucket: its part of a gradient is one number
using Sums = std::map<Key, double>;

struct Layout {
  std::vector<std::vector<int>> buckets_of;
  int bucket_count = 1;
};

// One rank: carries actions out on numbers, and does to gradients of earlier windows and to factors what grads/window.py does.
struct Rank {
  Rank(const Layout& layout, bool is_static)
      : layout(layout),
        schedule(layout.buckets_of, layout.bucket_count, is_static),
        held(layout.buckets_of.size(), 0),
        content(layout.buckets_of.size(), 0),
        factors(layout.buckets_of.size(), 1.0) {}

  // Added to what p.grad holds, or instead of it if p.grad was None.
  void gradient(int param, bool launch, double value) {
    const auto i = static_cast<size_t>(param);
    const bool adds = held[i], was_open = is_open;
    if (!is_open) {
      open_window(adds ? -1 : param, {});
    }
    const bool replaces = !adds && (schedule.has_stored(param) || (was_open && content[i]));
    if (adds) {
      value /= factors[i];
    } else {
      factors[i] = 1.0;
    }
    const bool is_quick = was_open && !replaces && factors[i] == 1.0 && schedule.is_first(param);
    if (is_quick && launch) {  // as native hooks do it
      for (const int bucket : layout.buckets_of[i]) {
        CHECK(memory.emplace(Key{param, bucket}, value).second);
      }
      if (schedule.arrive(param, true)) {
        for (const LaunchAction& launch_now : schedule.ready()) {
          send(launch_now);
        }
      }
    } else {
      const Actions actions = schedule.gradient(param, replaces, launch);
      for (const StoreAction& store : actions.stores) {
        double& place = (store.late ? late : memory)[{store.param, store.bucket}];
        place = (store.add ? place : 0) + value;
      }
      for (const LaunchAction& launch_now : actions.launches) {
        send(launch_now);
      }
    }
    held[i] = 1;
  }

  // Sums of this window are added to what was there: that gets what is pending for it, all but `remaining`.
  void open_window(int arriving, std::span<const double> remaining) {
    is_open = true;
    for (size_t i = 0; i < held.size(); ++i) {
      const double rest = remaining.empty() ? 1.0 : remaining[i];
      if (content[i] && (static_cast<int>(i) == arriving || !held[i])) {
        content[i] = 0;
        factors[i] = 1.0;
      }
      for (auto& [key, sum] : shard) {
        if (static_cast<size_t>(key.first) == i) {
          sum *= content[i] ? factors[i] / rest : 0.0;
        }
      }
      factors[i] = content[i] ? rest : factors[i];
    }
  }

  void scale(size_t param, double factor) { factors[param] *= held[param] ? factor : 1.0; }

  // Whether earlier windows left something that nobody has dropped here.
  std::vector<uint8_t> older() const {
    std::vector<uint8_t> out(held.size());
    std::transform(held.begin(), held.end(), content.begin(), out.begin(), std::bit_and<>());
    return out;
  }

  void zero_grad() {
    schedule.discard();
    late.clear();
    std::fill(held.begin(), held.end(), 0);
    if (is_open) {
      std::fill(factors.begin(), factors.end(), 1.0);
    }
  }

  void send(const LaunchAction& launch) {
    Sums part;
    Sums& from = launch.late ? late : memory;
    for (size_t param = 0; param < layout.buckets_of.size(); ++param) {
      const auto& buckets = layout.buckets_of[param];
      const Key key{static_cast<int>(param), launch.bucket};
      if (std::find(buckets.begin(), buckets.end(), launch.bucket) == buckets.end()) {
        continue;
      }
      const bool is_absent = std::find(launch.absent.begin(), launch.absent.end(), key.first) != launch.absent.end();
      CHECK(launch.late || is_absent == !from.contains(key));
      part[key] = from.contains(key) ? from[key] : 0;
      from.erase(key);
    }
    sent.emplace_back(std::pair(launch.bucket, launch.late), std::move(part));
  }

  void settle(const WindowVerdict& agreement) {
    held = content = agreement.held;
    for (size_t i = 0; i < held.size(); ++i) {
      factors[i] = held[i] ? factors[i] : 1.0;
    }
  }

  Layout layout;
  Schedule schedule;
  std::vector<uint8_t> held, content;
  std::vector<double> factors;
  bool is_open = false;
  Sums memory, late;
  Sums shard;  // of the parts that this rank owns
  std::vector<std::pair<std::pair<int, bool>, Sums>> sent;
};

// What has happened in all simulations, so that they were what they say.
struct Counts {
  int64_t late_rounds = 0, replaced = 0, overlapped = 0, kept = 0, scaled_in_between = 0, refused = 0;
};

class Simulation {
 public:
  Simulation(uint32_t seed, Counts* counts)
      : counts_(*counts), random_(seed), layout_(random_layout()), is_static_(chance(0.2)) {
    const int world = below(4) + 1;
    for (int rank = 0; rank < world; ++rank) {
      ranks_.emplace_back(layout_, is_static_);
      static_orders_.push_back(random_order({}));
    }
    for (size_t param = 0; param < layout_.buckets_of.size(); ++param) {
      for (const int bucket : layout_.buckets_of[param]) {
        owner_of({static_cast<int>(param), bucket}).shard[{static_cast<int>(param), bucket}] = 0;
      }
    }
    expected_.assign(layout_.buckets_of.size(), 0);
  }

  void run() {
    for (int window = 0; window < 5; ++window) {
      is_static_ ? static_window() : free_window();
      scale_some(false);
      close();
      if (chance(0.3)) {
        scale_some(false);
        close();  // asked again
      }
      scale_some(false);
      if (chance(0.6)) {
        zero_grad();
      } else {
        ++counts_.kept;
      }
    }
  }

 private:
  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random_) < p; }

  Layout random_layout() {
    Layout layout;
    int bucket = 0;
    for (int count = below(8) + 1; count > 0; --count) {
      const int span = chance(0.6) ? 1 : below(3) + 1;
      std::vector<int> buckets;
      for (int i = 0; i < span; ++i) {
        buckets.push_back(bucket + i);
      }
      layout.bucket_count = std::max(layout.bucket_count, bucket + span);
      bucket += span - 1 + below(2);
      layout.buckets_of.push_back(std::move(buckets));
    }
    if (chance(0.3)) {
      layout.buckets_of.emplace_back();  // a parameter without elements
    }
    return layout;
  }

  // The gradients of one backward, some twice (shared weights, reentrant checkpointing), in any order.
  std::vector<int> random_order(const std::set<int>& all_of) {
    std::vector<int> order;
    for (int param = 0; param < static_cast<int>(layout_.buckets_of.size()); ++param) {
      for (int times = all_of.contains(param) || chance(0.7) ? 1 + chance(0.2) : 0; times > 0; --times) {
        order.push_back(param);
      }
    }
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  Rank& owner_of(const Key& key) { return ranks_[static_cast<size_t>(key.first + key.second) % ranks_.size()]; }

  bool is_held_everywhere(size_t param) const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.held[param] != 0; });
  }

  void arrive(Rank& rank, int param, bool launch) {
    const double value = below(100) + 1;
    expected_[static_cast<size_t>(param)] += value;
    rank.gradient(param, launch, value);
  }

  void zero_grad() {
    for (Rank& rank : ranks_) {
      rank.zero_grad();
    }
    std::fill(expected_.begin(), expected_.end(), 0);
  }

  void drop(size_t param) {
    expected_[param] = 0;
    for (Rank& rank : ranks_) {
      rank.held[param] = 0;
    }
  }

  // p.grad *= 2, wherever there is one; those that more gradients may come for only where all ranks have one.
  void scale_some(bool only_common) {
    for (size_t param = 0; param < expected_.size(); ++param) {
      const bool is_refused = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
        return rank.held[param] && !rank.content[param] && rank.schedule.is_private(static_cast<int>(param));
      });
      if (is_refused || (only_common && !is_held_everywhere(param)) || chance(0.7)) {
        counts_.refused += is_refused;
        continue;
      }
      const double factor = chance(0.5) ? 2.0 : 0.25;
      expected_[param] *= factor;
      for (Rank& rank : ranks_) {
        rank.scale(param, factor);
      }
    }
  }

  // Every rank has its own gradients, the same in each window, in time or not.
  void static_window() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const int param : static_orders_[r]) {
        arrive(ranks_[r], param, true);
        CHECK(!ranks_[r].schedule.is_deviation(param));
      }
    }
  }

  void free_window() {
    const int kind = below(3);  // what happens between two backward passes: nothing, zero_grad, p.grad = None
    std::set<int> restarted;
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && kind == 1) {
        zero_grad();
        ++counts_.replaced;
      }
      const bool are_open = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.is_open; });
      if (half == 1 && kind == 2 && are_open) {
        for (size_t param = 0; param < expected_.size(); ++param) {
          if (is_held_everywhere(param) && chance(0.5)) {
            restarted.insert(static_cast<int>(param));
            drop(param);
            ++counts_.replaced;
          }
        }
      }
      if (half == 1 && are_open && chance(0.5)) {  // else a rank that begins later would disagree, which is an error
        scale_some(true);
        ++counts_.scaled_in_between;
      }
      for (Rank& rank : ranks_) {
        if (restarted.empty() && kind != 1 && chance(0.15)) {
          continue;  // skips this backward; not where another rank drops what it had by then, which is an error
        }
        for (const int param : random_order(kind == 1 ? std::set<int>{0} : restarted)) {
          arrive(rank, param, chance(0.9));
        }
      }
    }
    if (chance(0.3)) {  // p.grad = None after backward, everywhere
      drop(static_cast<size_t>(below(static_cast<int>(expected_.size()))));
    }
  }

  void close() {
    for (Rank& rank : ranks_) {
      counts_.overlapped += static_cast<int64_t>(rank.sent.size());
      for (const StoreAction& drop : rank.schedule.drops(rank.held)) {
        rank.late[{drop.param, drop.bucket}] = 0;
      }
    }
    for (Rank& rank : ranks_) {
      for (const LaunchAction& launch : rank.schedule.flush()) {
        rank.send(launch);
      }
    }
    const std::vector<WindowVerdict> agreements = agree();
    for (const WindowVerdict& agreement : agreements) {
      CHECK(agreement.conflicts.empty() && agreement.scaled_apart.empty());
      CHECK(agreement.held == agreements.front().held);
      CHECK(agreement.late == agreements.front().late || is_static_);
    }
    const WindowVerdict& agreement = agreements.front();
    std::vector<std::vector<LaunchAction>> lates(ranks_.size());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (agreements[r].is_dirty) {
        if (!ranks_[r].is_open) {
          ranks_[r].open_window(-1, agreements[r].factors);
        }
        const std::vector<double>& agreed = agreements[r].factors;
        ranks_[r].factors = agreed.empty() ? std::vector<double>(expected_.size(), 1.0) : agreed;
      }
      std::vector<LaunchAction> first;
      ranks_[r].schedule.close(agreements[r], &first, &lates[r]);
      for (const LaunchAction& launch : first) {
        ranks_[r].send(launch);
      }
    }
    CHECK(!agreement.is_dirty || ranks_.front().sent.size() == static_cast<size_t>(layout_.bucket_count));
    reduce();
    for (const int param : agreement.voided) {
      for (const int bucket : layout_.buckets_of[static_cast<size_t>(param)]) {
        owner_of({param, bucket}).shard[{param, bucket}] = 0;
      }
    }
    counts_.late_rounds += static_cast<int64_t>(agreement.late.size());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const LaunchAction& launch : lates[r]) {
        ranks_[r].send(launch);
      }
    }
    reduce();
    for (size_t param = 0; param < expected_.size(); ++param) {
      CHECK(agreement.held[param] ==
            std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.held[param] != 0; }));
    }
    for (Rank& rank : ranks_) {
      rank.settle(agreement);
      rank.is_open = rank.is_open && !agreement.is_dirty;
      CHECK(rank.factors == ranks_.front().factors);
      for (const auto& [key, sum] : rank.shard) {
        const auto param = static_cast<size_t>(key.first);
        CHECK((agreement.held[param] ? sum * rank.factors[param] : 0) == expected_[param]);
      }
    }
  }

  std::vector<WindowVerdict> agree() {
    std::vector<std::vector<uint8_t>> notes;
    std::vector<std::string_view> views;
    for (const Rank& rank : ranks_) {
      notes.push_back(rank.schedule.notes(rank.held, rank.older(), rank.factors));
    }
    for (const std::vector<uint8_t>& note : notes) {
      views.emplace_back(reinterpret_cast<const char*>(note.data()), note.size());
    }
    std::vector<WindowVerdict> agreements;
    for (const Rank& rank : ranks_) {
      CHECK(rank.schedule.find_deviation(rank.held) == -1);
      agreements.push_back(rank.schedule.is_learnt() ? rank.schedule.assume(rank.held, rank.older(), rank.factors)
                                                     : rank.schedule.agree(views));
    }
    return agreements;
  }

  // The communicator: all ranks have called the same operations in the same order; the sums go to the shards.
  void reduce() {
    for (const Rank& rank : ranks_) {
      CHECK(rank.sent.size() == ranks_.front().sent.size());
    }
    for (size_t i = 0; i < ranks_.front().sent.size(); ++i) {
      for (const Rank& rank : ranks_) {
        CHECK(rank.sent[i].first == ranks_.front().sent[i].first);
        for (const auto& [key, value] : rank.sent[i].second) {
          owner_of(key).shard[key] += value;
        }
      }
    }
    for (Rank& rank : ranks_) {
      rank.sent.clear();
    }
  }

  Counts& counts_;
  std::mt19937 random_;
  Layout layout_;
  bool is_static_ = false;
  std::vector<Rank> ranks_;
  std::vector<std::vector<int>> static_orders_;
  std::vector<double> expected_;  // of each parameter: its gradient as everybody sees it
};

std::string_view view_of(const std::vector<uint8_t>& notes) {
  return {reinterpret_cast<const char*>(notes.data()), notes.size()};
}

// The end of a window of one rank.
void close_alone(Schedule& schedule, const std::vector<uint8_t>& held) {
  const std::vector<uint8_t> notes = schedule.notes(held, {}, {});
  const std::string_view view = view_of(notes);
  std::vector<LaunchAction> first, late;
  schedule.close(schedule.agree({&view, 1}), &first, &late);
}

}  // namespace

TEST(an_unused_parameter_stops_holding_buckets_up) {
  Schedule schedule({{0}, {0}, {1}}, 2);
  const std::vector<uint8_t> held{1, 0, 1};
  for (int window = 0; window < 6; ++window) {
    size_t during = 0;
    for (const int param : {2, 0}) {
      during += schedule.gradient(param, false, true).launches.size();
    }
    CHECK(during == (window < 5 ? 0 : 2));
    close_alone(schedule, held);
  }
}

TEST(what_is_left_goes_before_ranks_agree) {
  Schedule busy({{0}, {1}}, 2), idle({{0}, {1}}, 2);
  busy.gradient(1, false, true);
  CHECK(busy.flush() == (std::vector<LaunchAction>{{0, {0}, false}, {1, {}, false}}));
  CHECK(idle.flush().empty());  // it has not heard of the other's gradient
  const std::vector<uint8_t> held{0, 1}, nothing{0, 0};
  const std::vector<uint8_t> notes[2] = {busy.notes(held, {}, {}), idle.notes(nothing, {}, {})};
  const std::string_view views[2] = {view_of(notes[0]), view_of(notes[1])};
  const WindowVerdict agreement = busy.agree(views);
  CHECK(agreement.is_dirty && !agreement.is_complete);
  std::vector<LaunchAction> first, late;
  busy.close(agreement, &first, &late);
  CHECK(first.empty() && late.empty());
  idle.close(agreement, &first, &late);
  CHECK(first == (std::vector<LaunchAction>{{0, {0}, false}, {1, {1}, false}}) && late.empty());
}

TEST(grad_sync_of_some_launches_what_is_complete) {
  Schedule schedule({{0}, {0}, {1}}, 2);
  schedule.gradient(1, false, false);
  schedule.gradient(2, false, false);
  const int last = 2, others[2] = {0, 1};
  CHECK(schedule.complete({&last, 1}).empty());
  const std::vector<LaunchAction> complete = schedule.complete(others);
  CHECK(complete.size() == 2 && complete[0].bucket == 0 && complete[1].bucket == 1);
  CHECK(schedule.flush().empty());
}

TEST(notes_of_another_layout_are_refused) {
  const Schedule schedule({{0}, {0}}, 1);
  const std::vector<uint8_t> nothing{0, 0}, notes = schedule.notes(nothing, {}, {});
  const std::string own(view_of(notes));
  for (const std::string& wrong : {std::string(), own.substr(1), own + "1234"}) {
    const std::string_view views[2] = {own, wrong};
    CHECK_THROWS(Error, "2 parameters in 1 buckets; run the same version", schedule.agree(views));
  }
}

// The first window has gradients of parameters 0 and 1. More of them are no harm while they come in time.
TEST(what_breaks_the_promise_of_a_static_graph_is_found) {
  const struct {
    std::vector<int> gradients, at_once;
    int at_end;
  } cases[] = {{{0, 2}, {2}, 1}, {{0, 1, 0}, {0}, 0}, {{1}, {}, 0}, {{0, 1}, {}, -1}, {{0, 0, 1}, {}, -1}, {{}, {}, 0}};
  for (const auto& [gradients, at_once, at_end] : cases) {
    Schedule schedule({{0}, {0}, {0}}, 1, true);
    schedule.gradient(0, false, true);
    schedule.gradient(1, false, true);
    close_alone(schedule, {1, 1, 0});
    std::vector<int> found;
    std::vector<uint8_t> held(3, 0);
    for (const int param : gradients) {
      schedule.gradient(param, false, true);
      held[static_cast<size_t>(param)] = 1;
      if (schedule.is_deviation(param)) {
        found.push_back(param);
      }
    }
    CHECK(found == at_once && schedule.find_deviation(held) == at_end);
  }
}

TEST(ten_thousand_random_schedules_have_one_sequence_on_every_rank_and_the_right_sums) {
  Counts counts;
  for (uint32_t seed = 0; seed < 10000; ++seed) {
    Simulation simulation(seed, &counts);
    simulation.run();
  }
  CHECK(counts.late_rounds > 10000 && counts.replaced > 10000 && counts.overlapped > 10000);
  CHECK(counts.kept > 10000 && counts.scaled_in_between > 10000 && counts.refused > 1000);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
