// pool/free_list: placement against a reference model. Run by test_native.py.
// needs: base device pool
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/env.h"
#include "check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "pools.h"

using namespace bucketwheel;

namespace {

// The pool's rule in its plainest form: every byte range in one list, scanned from the front.
class Model {
 public:
  std::pair<uint32_t, size_t> acquire(size_t size_bytes) {
    const size_t red_zone_bytes = env().pool_poison ? 512 : 0;
    size_bytes = round_up(std::max<size_t>(size_bytes, 1), 512) + red_zone_bytes;
    for (;;) {
      std::optional<std::pair<uint32_t, size_t>> best;
      for (const auto& [place, range] : ranges_) {
        if (range.is_free && range.size >= size_bytes && (!best || range.size < ranges_.at(*best).size)) {
          best = place;
        }
      }
      if (best) {
        Range& range = ranges_.at(*best);
        if (range.size > size_bytes) {
          ranges_[{best->first, best->second + size_bytes}] = {range.size - size_bytes, true};
        }
        range = {size_bytes, false};
        return *best;
      }
      ranges_[{slabs_++, 0}] = {round_up(std::max(size_bytes, kSlab), 4096), true};
    }
  }

  void release(std::pair<uint32_t, size_t> place) {
    ranges_.at(place).is_free = true;
    for (auto it = ranges_.begin(); it != ranges_.end();) {
      auto next = std::next(it);
      if (next != ranges_.end() && it->second.is_free && next->second.is_free && it->first.first == next->first.first &&
          it->first.second + it->second.size == next->first.second) {
        it->second.size += next->second.size;
        ranges_.erase(next);
      } else {
        it = next;
      }
    }
  }

  uint32_t slabs() const { return slabs_; }

 private:
  struct Range {
    size_t size;
    bool is_free;
  };
  std::map<std::pair<uint32_t, size_t>, Range> ranges_;
  uint32_t slabs_ = 0;
};

}  // namespace

// Whatever the fences do, offsets are the model's; live leases never overlap (their bytes keep their values).
TEST(placement_follows_the_reference_model) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    auto pool = make_pool();
    auto stream = cpu_device().new_stream("model");
    Model model;
    std::vector<std::pair<LeaseRef, unsigned char>> live;
    for (int i = 0; i < 2000; ++i) {
      if (live.empty() || (live.size() < 60 && random() % 100 < 52)) {
        const size_t sizes[] = {0, 1, 511, 512, 513, 4096, 70000, kSlab / 3, kSlab + 1};
        const size_t size = random() % 3 ? random() % 40000 : sizes[random() % 9];
        LeaseRef lease = pool->acquire("", size, random() % 2 ? stream : StreamRef());
        stream->synchronize();
        const auto place = model.acquire(size);
        CHECK(place == std::pair(lease->slab()->id, lease->offset_bytes()));
        CHECK(lease->data() == lease->slab()->data + lease->offset_bytes());
        CHECK(is_aligned(lease->data(), 512) && lease->size_bytes() == size);
        std::memset(lease->data(), i & 255, size);
        live.emplace_back(lease, i & 255);
      } else {
        const size_t chosen = random() % live.size();
        auto [lease, value] = live[chosen];
        live[chosen] = live.back();
        live.pop_back();
        CHECK(holds_only(lease->data(), lease->size_bytes(), value));
        if (random() % 2) {
          stream->run([] {});
        }
        lease->release(random() % 2 ? stream->record() : nullptr);
        model.release({lease->slab()->id, lease->offset_bytes()});
      }
      if (i % 100 == 0) {
        pool->check();
      }
    }
    const PoolStats stats = pool->stats();
    CHECK(stats.live_leases == live.size() && stats.slabs == model.slabs());
    CHECK(stats.reuses > 300 && stats.high_water_bytes >= stats.live_bytes);
    live.clear();
    pool->check();
    CHECK(pool->stats().live_bytes == 0 && pool->stats().live_leases == 0 && pool->stats().dropped_leases > 0);
    pool->expect_no_leases();
  }
}

TEST(zero_bytes_large_sizes_and_alignments) {
  for (size_t align : {size_t{1}, size_t{64}, size_t{512}, size_t{4096}}) {
    auto pool = make_pool({align, kSlab, false});
    auto zero = pool->acquire("zero", 0);
    auto one = pool->acquire("one", 1);
    auto also_zero = pool->acquire("also zero", 0);
    CHECK(zero->data() != nullptr && zero->data() != also_zero->data() && zero->size_bytes() == 0);
    auto large = pool->acquire("large", 5 * kSlab + 3);
    CHECK(large->slab() != one->slab() && large->slab()->size_bytes >= 5 * kSlab + 3);
    for (const LeaseRef& lease : {zero, one, also_zero, large}) {
      CHECK(is_aligned(lease->data(), align));
    }
    large->data()[5 * kSlab + 2] = std::byte{1};
    pool->check();
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
