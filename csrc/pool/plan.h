// PoolPlan: where the keys of a step lie. bucketwheel/pool/plan.py makes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bucketwheel {

// Where a plan puts a key.
struct PlannedKey {
  std::string key;
  size_t offset_bytes = 0;
  size_t size_bytes = 0;       // > 0
  bool outlives_step = false;  // it may be live when a step ends
};

struct PoolPlan {
  std::string name;
  std::vector<PlannedKey> keys;
  std::vector<uint32_t> order;  // of the acquires of a step, as indices of `keys`; a strict pool holds steps to it
  size_t total_bytes = 0;
  size_t load_bytes = 0;  // the most that is live at once
};

}  // namespace bucketwheel
