// Placement: where each key of a memory plan lies in one arena, so that keys that are live at the same time do not overlap and
// the arena is small. Pure integers: the same offsets on every rank and platform.
//
// A key has a size and live intervals [start, stop) in steps of a schedule, and one offset for all of them. Two keys whose
// intervals meet are in *conflict*. The *load* is the most bytes that are live in one step: no placement is smaller. This
// is dynamic storage allocation, which is NP-hard; with several intervals a key it may need more than the load.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace bucketwheel {

using LiveInterval = std::pair<int64_t, int64_t>;  // start, stop
// The bytes of a key, rounded up by the caller if offsets are to be aligned, and when it is live, ascending.
using PlacementKey = std::pair<int64_t, std::vector<LiveInterval>>;

struct Placement {
  std::vector<int64_t> offsets;  // by key
  int64_t total_bytes = 0;       // of the arena: the largest end of a key
  int64_t load_bytes = 0;
  int64_t bound_bytes = 0;  // no placement is smaller: the load, or the smallest total of a part of the keys
};

// The smallest of what best fit, first fit by size, a search along the conflicts and an exact search find. It ends where a
// bound is met; each search when it has put about `effort` keys somewhere, fewer where there are many keys to look at.
// Keys come in the order of their first starts. ValueError for a negative size and an empty interval.
Placement place(const std::vector<PlacementKey>& keys, int64_t effort);

// What an allocator does that serves one key after the other, at its first start, and knows when it will be live: of the
// ranges that are free in all its intervals the smallest one that holds it.
Placement place_best_fit(const std::vector<PlacementKey>& keys);

}  // namespace bucketwheel
