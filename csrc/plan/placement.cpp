#include "plan/placement.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

using Key = uint32_t;
using Offsets = std::vector<int64_t>;  // by key

constexpr int64_t kUnplaced = -1;
constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max() / 2;
constexpr size_t kKeysOfNode = 32;                 // a node costs one more for so many keys that it looks at
constexpr size_t kMaxConflicts = size_t{1} << 24;  // pairs that a search keeps: 128 MiB

struct Event {
  int64_t step = 0;
  bool is_start = false;  // stops first: intervals are half open
  Key key = 0;
  auto operator<=>(const Event&) const = default;
};

std::vector<Event> events_of(const std::vector<PlacementKey>& keys) {
  std::vector<Event> events;
  for (Key key = 0; key < keys.size(); ++key) {
    const auto& [size, live] = keys[key];
    BW_EXPECTS(size >= 0, "key " + std::to_string(key) + " has " + std::to_string(size) + " bytes");
    for (const auto& [start, stop] : live) {
      BW_EXPECTS(start < stop, "key " + std::to_string(key) + " is live in [" + std::to_string(start) + ", " +
                                   std::to_string(stop) + ")");
      events.push_back({start, true, key});
      events.push_back({stop, false, key});
    }
  }
  std::sort(events.begin(), events.end());
  return events;
}

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  auto operator<=>(const Range&) const = default;
};

// What is free of [0, top) beside `taken`, which ascends: the ranges of at least `size` bytes.
std::vector<Range> gaps_between(const std::vector<Range>& taken, int64_t top, int64_t size) {
  std::vector<Range> gaps;
  int64_t at = 0;
  for (const Range& range : taken) {
    if (range.begin - at >= size) {
      gaps.push_back({at, range.begin});
    }
    at = std::max(at, range.end);
  }
  if (top - at >= size) {
    gaps.push_back({at, top});
  }
  return gaps;
}

// What the searches know of the keys.
struct Problem {
  std::vector<int64_t> sizes;
  std::vector<std::vector<Key>> conflicts;  // by key: those it must not overlap, ascending
  std::vector<std::vector<Key>> slices;  // keys that are live at once, in the order of time; none is a part of the next
  size_t heaviest = 0;                   // slice
  int64_t load_bytes = 0;
  bool is_whole = true;  // false: there are too many conflicts to keep

  explicit Problem(const std::vector<PlacementKey>& keys) : sizes(keys.size()), conflicts(keys.size()) {
    std::transform(keys.begin(), keys.end(), sizes.begin(), [](const PlacementKey& key) { return key.first; });
    std::vector<Key> live;
    int64_t live_bytes = 0;
    size_t count = 0;
    bool has_grown = false;
    for (const auto& [step, is_start, key] : events_of(keys)) {
      if (!is_start) {
        if (has_grown && is_whole) {
          slices.push_back(live);
        }
        has_grown = false;
        live.erase(std::find(live.begin(), live.end(), key));
        live_bytes -= sizes[key];
        continue;
      }
      count += live.size();
      is_whole = is_whole && count <= kMaxConflicts;
      for (size_t i = 0; is_whole && i < live.size(); ++i) {
        conflicts[key].push_back(live[i]);
        conflicts[live[i]].push_back(key);
      }
      live.push_back(key);
      live_bytes += sizes[key];
      has_grown = true;
      if (live_bytes > load_bytes) {
        load_bytes = live_bytes;
        heaviest = slices.size();
      }
    }
    for (std::vector<Key>& others : conflicts) {
      std::sort(others.begin(), others.end());
      others.erase(std::unique(others.begin(), others.end()), others.end());
    }
  }

  // Where `key` fits below `top`, with `placed` where they are.
  std::vector<Range> gaps(Key key, const Offsets& placed, int64_t top) const {
    std::vector<Range> taken;
    for (const Key other : conflicts[key]) {
      if (placed[other] != kUnplaced) {
        taken.push_back({placed[other], placed[other] + sizes[other]});
      }
    }
    std::sort(taken.begin(), taken.end());
    return gaps_between(taken, top, sizes[key]);
  }

  // Each key at the lowest offset where it fits beside those before it in the order.
  Offsets first_fit(const std::vector<Key>& order) const {
    Offsets placed(order.size(), kUnplaced);
    for (const Key key : order) {
      placed[key] = gaps(key, placed, kNoEnd).front().begin;
    }
    return placed;
  }

  int64_t total_of(const Offsets& offsets) const {
    int64_t total = 0;
    for (size_t key = 0; key < sizes.size(); ++key) {
      total = std::max(total, offsets[key] + sizes[key]);
    }
    return total;
  }
};

// The best so far, and what is known of better ones.
struct Found {
  Offsets offsets;
  int64_t total_bytes = kNoEnd;
  int64_t bound_bytes = 0;

  bool is_best() const { return total_bytes <= bound_bytes; }

  void offer(const Problem& problem, const Offsets& others) {
    if (const int64_t total = problem.total_of(others); total < total_bytes) {
      offsets = others;
      total_bytes = total;
    }
  }
};

std::vector<Key> order_by(size_t count, auto&& rank) {
  std::vector<Key> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](Key a, Key b) { return rank(a) < rank(b); });
  return order;
}

// --- best fit --------------------------------------------------------------------------------------------------------

bool meet(const std::vector<LiveInterval>& a, const std::vector<LiveInterval>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const auto [start, stop] = a[i];
    const auto [other_start, other_stop] = b[j];
    if (start < other_stop && other_start < stop) {
      return true;
    }
    stop <= other_start ? ++i : ++j;
  }
  return false;
}

// Each key in the smallest gap that is free in all its intervals. It keeps no conflicts, so there may be any number of them.
Found best_fit(const std::vector<PlacementKey>& keys, int64_t load_bytes) {
  Found found{Offsets(keys.size(), 0), 0, load_bytes};
  std::vector<Key> open;  // those that have not ended, in the order in which they lie
  std::vector<Range> taken;
  for (Key key = 0; key < keys.size(); ++key) {
    const auto& [size, live] = keys[key];
    if (live.empty()) {  // anywhere
      found.total_bytes = std::max(found.total_bytes, size);
      continue;
    }
    std::erase_if(open, [&](Key other) { return keys[other].second.back().second <= live.front().first; });
    taken.clear();
    for (const Key other : open) {
      if (meet(live, keys[other].second)) {
        taken.push_back({found.offsets[other], found.offsets[other] + keys[other].first});
      }
    }
    std::vector<Range> gaps = gaps_between(taken, kNoEnd, size);
    if (gaps.back().begin + size <= found.total_bytes) {
      gaps.back().end = found.total_bytes;
    }
    const auto is_smaller = [](const Range& a, const Range& b) { return a.end - a.begin < b.end - b.begin; };
    found.offsets[key] = std::min_element(gaps.begin(), gaps.end(), is_smaller)->begin;
    found.total_bytes = std::max(found.total_bytes, found.offsets[key] + size);
    open.insert(std::upper_bound(open.begin(), open.end(), key,
                                 [&](Key a, Key b) { return found.offsets[a] < found.offsets[b]; }),
                key);
  }
  return found;
}

// --- a search along the conflicts ------------------------------------------------------------------------------------

// Neighbours near each other (Cuthill and McKee 1969): each part of the graph breadth first, from a key of few conflicts.
std::vector<Key> along_conflicts(const Problem& problem) {
  const auto few_first = [&](Key key) { return std::tuple(problem.conflicts[key].size(), -problem.sizes[key], key); };
  std::vector<uint8_t> is_taken(problem.sizes.size(), 0);
  std::vector<Key> order;
  for (const Key first : order_by(problem.sizes.size(), few_first)) {
    if (std::exchange(is_taken[first], uint8_t{1})) {
      continue;
    }
    order.push_back(first);
    for (size_t i = order.size() - 1; i < order.size(); ++i) {
      const size_t begin = order.size();
      for (const Key key : problem.conflicts[order[i]]) {
        if (!std::exchange(is_taken[key], uint8_t{1})) {
          order.push_back(key);
        }
      }
      std::sort(order.begin() + static_cast<ptrdiff_t>(begin), order.end(),
                [&](Key a, Key b) { return few_first(a) < few_first(b); });
    }
  }
  return order;
}

// [Note: search along the conflicts] Keys are placed in an order in which conflicts are near each other, in many ways at
// once (a beam). What a way has chosen matters only for keys of the *frontier*: placed, and in conflict with one that is
// not. Ways of the same frontier are one; of the rest those are kept that leave the fewest gaps between the frontier's
// keys. A key is put at either end of a gap. Steps of training are nearly periodic along this order, so a good pattern is
// found once and goes on to the end.
class BeamSearch {
 public:
  explicit BeamSearch(const Problem& problem)
      : problem_(problem), order_(along_conflicts(problem)), last_(order_.size()) {
    for (size_t i = 0; i < order_.size(); ++i) {
      last_[order_[i]] = i;
      for (const Key other : problem.conflicts[order_[i]]) {
        last_[other] = i;
      }
    }
  }

  // Looks for a placement of at most `height` bytes with `width` ways at once.
  bool run(int64_t height, size_t width, int64_t* nodes, Found* found) {
    std::vector<Offsets> ways{Offsets(order_.size(), kUnplaced)}, next;
    std::vector<Key> frontier;
    std::vector<Step> steps;
    for (size_t i = 0; i < order_.size(); ++i) {
      const Key key = order_[i];
      frontier.push_back(key);
      std::erase_if(frontier, [&](Key one) { return last_[one] <= i; });
      steps.clear();
      for (size_t way = 0; way < ways.size(); ++way) {
        *nodes -= 1 + static_cast<int64_t>(frontier.size() / kKeysOfNode);
        for (const Range& gap : problem_.gaps(key, ways[way], height)) {
          for (const int64_t offset : {gap.begin, gap.end - problem_.sizes[key]}) {
            ways[way][key] = offset;
            steps.push_back(step_to(way, offset, ways[way], frontier, height));
          }
        }
      }
      if (steps.empty() || *nodes < 0) {
        return false;
      }
      std::sort(steps.begin(), steps.end());
      const auto is_same = [](const Step& a, const Step& b) { return a.hash == b.hash; };
      steps.erase(std::unique(steps.begin(), steps.end(), is_same), steps.end());
      steps.resize(std::min(steps.size(), width));
      next.clear();
      for (const Step& step : steps) {
        next.push_back(ways[step.way]);
        next.back()[key] = step.offset;
      }
      ways.swap(next);
    }
    // As low as they can be, in the order in which they lie.
    const std::vector<Key> from_below = order_by(order_.size(), [&](Key key) { return ways[0][key]; });
    found->offer(problem_, problem_.first_fit(from_below));
    return true;
  }

 private:
  struct Step {  // the best one first
    size_t gaps = 0;
    uint64_t hash = 0;  // of the frontier
    size_t way = 0;
    int64_t offset = 0;
    auto operator<=>(const Step&) const = default;
  };

  Step step_to(size_t way, int64_t offset, const Offsets& offsets, const std::vector<Key>& frontier, int64_t height) {
    Step step{.hash = 0xcbf29ce484222325, .way = way, .offset = offset};
    std::vector<Range> taken;
    for (const Key key : frontier) {
      step.hash = (step.hash ^ static_cast<uint64_t>(offsets[key])) * 0x100000001b3;
      step.hash ^= step.hash >> 29;
      taken.push_back({offsets[key], offsets[key] + problem_.sizes[key]});
    }
    std::sort(taken.begin(), taken.end());
    step.gaps = gaps_between(taken, height, 1).size();
    return step;
  }

  const Problem& problem_;
  std::vector<Key> order_;
  std::vector<size_t> last_;  // by key: the place in the order of the last of it and its conflicts
};

// Ever wider, at heights between the load and what has been found. It is the only search that finds what repeats, so it gets
// a few passes also where there are some thousands of keys.
void search_along_conflicts(const Problem& problem, int64_t effort, Found* found) {
  const auto count = static_cast<int64_t>(problem.sizes.size());
  int64_t nodes = std::max(effort, std::min<int64_t>(40 * count, 200'000));
  BeamSearch search(problem);
  for (int64_t width = 8; width * count <= nodes && !found->is_best(); width *= 2) {
    const int64_t low = problem.load_bytes;
    for (int64_t height = low; width * count <= nodes && height < found->total_bytes; height += low / 100 + 1) {
      if (search.run(height, static_cast<size_t>(width), &nodes, found)) {
        break;
      }
    }
  }
}

// --- an exact search -------------------------------------------------------------------------------------------------

// Depth first over placements in which offsets ascend and each key is as low as those below let it be: one of them is the
// best. A branch ends when what is not yet placed of some slice cannot fit under the best total so far.
class ExactSearch {
 public:
  ExactSearch(const Problem& problem, int64_t* nodes, Found* found)
      : problem_(problem), nodes_(nodes), found_(found), offsets_(problem.sizes.size(), kUnplaced), lowest_(offsets_) {}

  // Whether it has ended, so that nothing is smaller than what has been found, or that is as small as its bound.
  bool run() {
    descend(0, 0, 0);
    return *nodes_ >= 0;
  }

 private:
  void descend(int64_t last, Key last_key, size_t placed) {
    if (placed == offsets_.size()) {
      found_->offer(problem_, offsets_);
      return;
    }
    std::vector<std::tuple<int64_t, int64_t, Key>> choices;  // offset, -size, key
    int64_t first_end = kNoEnd;
    for (Key key = 0; key < offsets_.size(); ++key) {
      if (offsets_[key] == kUnplaced) {
        const int64_t offset = above(key);
        choices.emplace_back(offset, -problem_.sizes[key], key);
        lowest_[key] = std::max(offset, last);
        first_end = std::min(first_end, lowest_[key] + problem_.sizes[key]);
      }
    }
    *nodes_ -= 1 + static_cast<int64_t>(offsets_.size() / kKeysOfNode);
    if (*nodes_ < 0 || !can_fit()) {
      return;
    }
    std::sort(choices.begin(), choices.end());
    for (const auto& [offset, minus_size, key] : choices) {
      if (offset > first_end || *nodes_ < 0 || found_->is_best()) {
        return;  // some key fits below this one, whatever follows
      }
      // Lower than the last, or as low and before it: another branch has it.
      const bool is_next = offset > last || (offset == last && key >= last_key);
      if (is_next && offset - minus_size < found_->total_bytes) {
        offsets_[key] = offset;
        descend(offset, key, placed + 1);
        offsets_[key] = kUnplaced;
      }
    }
  }

  int64_t above(Key key) const {
    int64_t end = 0;
    for (const Key other : problem_.conflicts[key]) {
      if (offsets_[other] != kUnplaced) {
        end = std::max(end, offsets_[other] + problem_.sizes[other]);
      }
    }
    return end;
  }

  bool can_fit() const {
    return std::all_of(problem_.slices.begin(), problem_.slices.end(), [&](const std::vector<Key>& slice) {
      int64_t lowest = kNoEnd, unplaced = 0;
      for (const Key key : slice) {
        if (offsets_[key] == kUnplaced) {
          lowest = std::min(lowest, lowest_[key]);
          unplaced += problem_.sizes[key];
        }
      }
      return unplaced == 0 || lowest + unplaced < found_->total_bytes;
    });
  }

  const Problem& problem_;
  int64_t* nodes_;
  Found* found_;
  Offsets offsets_;
  Offsets lowest_;  // where those that are not placed could begin
};

// The smallest total of a part of the keys is a bound for all: of the keys of ever more slices around the heaviest.
void raise_bound(const std::vector<PlacementKey>& keys, const Problem& problem, int64_t nodes, Found* found) {
  for (size_t reach = 1; !found->is_best() && reach < problem.slices.size(); ++reach) {
    const size_t first = problem.heaviest - std::min(problem.heaviest, reach);
    const size_t last = std::min(problem.heaviest + reach, problem.slices.size() - 1);
    std::set<Key> near;
    for (size_t slice = first; slice <= last; ++slice) {
      near.insert(problem.slices[slice].begin(), problem.slices[slice].end());
    }
    std::vector<PlacementKey> core;
    std::transform(near.begin(), near.end(), std::back_inserter(core), [&](Key key) { return keys[key]; });
    Found smallest{{}, found->total_bytes, found->bound_bytes};
    if (!ExactSearch(Problem(core), &nodes, &smallest).run()) {
      return;
    }
    found->bound_bytes = std::max(found->bound_bytes, smallest.total_bytes);
  }
}

}  // namespace

Placement place(const std::vector<PlacementKey>& keys, int64_t effort) {
  const Problem problem(keys);
  Found found = best_fit(keys, problem.load_bytes);
  if (problem.is_whole && !found.is_best()) {
    if (effort > 0) {
      search_along_conflicts(problem, effort, &found);
    }
    found.offer(problem, problem.first_fit(order_by(keys.size(), [&](Key key) { return -problem.sizes[key]; })));
    int64_t nodes = effort;
    if (ExactSearch(problem, &nodes, &found).run()) {
      found.bound_bytes = found.total_bytes;
    }
    raise_bound(keys, problem, effort, &found);
  }
  return {found.offsets, found.total_bytes, problem.load_bytes, found.bound_bytes};
}

Placement place_best_fit(const std::vector<PlacementKey>& keys) {
  const Problem problem(keys);
  const Found found = best_fit(keys, problem.load_bytes);
  return {found.offsets, found.total_bytes, problem.load_bytes, problem.load_bytes};
}

}  // namespace bucketwheel
