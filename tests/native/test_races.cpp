// The real pool and the `local` communicators in random legal orders of their streams: nothing is unordered; and with any of
// the waits forgotten something is, so each of them is needed. Run by test_native.py.
// needs: base device plan pool kernels comm window cuda_runtime adam_cuda adam_scalars_cuda norm_cuda norm_fold_cuda pack_cuda fibers fake_cuda
// runs: plain address
// slow: address
#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cuda_table.h"
#include "check.h"
#include "comm/comm.h"
#include "comm/host/local.h"
#include "device/device_cuda.h"
#include "fake_cuda/declared.h"
#include "fake_cuda/queues.h"
#include "plan/placement.h"
#include "pool/pool.h"
#include "pools.h"
#include "window/units.h"

using namespace bucketwheel;
using fake_cuda::Checked;

namespace {

// Valgrind and qemu are slow.
uint64_t schedules() { return emulator().empty() ? 10'000 : 100; }

constexpr size_t kUnit = 512;  // of all sizes: every byte of a block is used

PoolRef cuda_pool(bool poison = false) {
  return Pool::make(CudaDevice::at(0), make_cuda_upstream(0), {kUnit, 16 * kUnit, poison});
}

std::vector<StreamRef> new_streams(size_t count) {
  std::vector<StreamRef> streams;
  while (streams.size() < count) {
    streams.push_back(CudaDevice::at(0).new_stream("stream"));
  }
  return streams;
}

// `stream` writes or reads all bytes. A read finds `value`, unless something else is broken on purpose.
EventRef use(Stream& stream, const LeaseRef& lease, bool writes, int value, bool is_broken = false) {
  std::byte* const data = lease->data();
  stream.run([=, size = lease->size_bytes()] {
    fake_cuda::access(data, size, writes, "use");
    if (writes) {
      std::memset(data, value, size);
    } else {
      CHECK(is_broken || holds_only(data, size, value));
    }
  });
  return stream.record();
}

struct Program {
  uint64_t seed;
  bool is_planned = false;
  bool is_broken = false;  // a wait is forgotten, so values may be wrong
  bool poison = false;
  // What says nothing of a single wait: leases that are never used, dropped leases, acquires without a stream, memory that
  // is given back.
  bool has_idle_uses = false;
};

// Two plans of the same keys, whose places overlap at random: what cannot have its own lies in the side region.
std::vector<PoolPlan> some_plans(std::mt19937_64& random) {
  std::vector<PoolPlan> plans;
  for (const char* const name : {"train", "eval"}) {
    PoolPlan plan{name, {}, {}, 12 * kUnit};
    for (size_t key = 0; key < 8; ++key) {
      const size_t units = 1 + random() % 5;
      plan.keys.push_back({std::to_string(key), kUnit * (random() % (13 - units)), kUnit * units, true});
    }
    plans.push_back(std::move(plan));
  }
  return plans;
}

// Leases come and go: each is written in the stream that acquires it, and perhaps read in another one behind that.
class Run {
 public:
  explicit Run(const Program& program)
      : program_(program),
        random_(program.seed),
        pool_(cuda_pool(program.poison)),
        streams_(new_streams(3)),
        plans_(some_plans(random_)) {}

  void run() {
    if (program_.is_planned) {
      pool_->adopt(plans_, false);
    }
    for (int turn = 0; turn < 40; ++turn) {
      fake_cuda::set_place("turn " + std::to_string(turn));
      if (live_.size() >= 4 || (!live_.empty() && chance(2))) {
        release();
      } else {
        acquire(turn);
      }
      if (program_.is_planned && chance(8)) {
        regime_ = 1 - regime_;
        pool_->set_regime(plans_[regime_].name);
      }
    }
    while (!live_.empty()) {
      release();
    }
    pool_->check();
    if (program_.has_idle_uses) {
      pool_->adopt({}, false);
      pool_->trim();
      CHECK(pool_->stats().reserved_bytes == 0);
    }
  }
  uint64_t planned() const { return pool_->stats().planned_acquires; }

 private:
  struct Held {
    LeaseRef lease;
    EventRef used;  // null: never, and it is dropped or given back without an event
    size_t key = 0;
  };

  bool chance(uint64_t in) { return random_() % in == 0; }
  bool idles(uint64_t in) { return program_.has_idle_uses && chance(in); }

  void acquire(int turn) {
    size_t key = random_() % 8;
    while (std::ranges::any_of(live_, [key](const Held& held) { return held.key == key; })) {
      key = (key + 1) % 8;
    }
    const PlannedKey& planned = plans_[regime_].keys[key];
    const StreamRef& home = streams_[random_() % streams_.size()];
    const StreamRef& other = streams_[random_() % streams_.size()];
    const bool is_on_host = idles(4);
    const LeaseRef lease =
        pool_->acquire(program_.is_planned ? planned.key : "", planned.size_bytes, is_on_host ? nullptr : home);
    if (idles(4)) {
      live_.push_back({lease, nullptr, key});
      return;
    }
    EventRef used = use(*home, lease, true, turn);
    if (other != home && chance(2)) {
      other->wait(used);
      used = use(*other, lease, false, turn, program_.is_broken);
    } else if (!is_on_host && idles(4)) {
      return;  // dropped: the last use is in the stream of the acquire
    }
    live_.push_back({lease, used, key});
  }

  void release() {
    std::swap(live_[random_() % live_.size()], live_.back());
    if (live_.back().used != nullptr || chance(2)) {
      live_.back().lease->release(live_.back().used);
    }
    live_.pop_back();
  }

  const Program program_;
  std::mt19937_64 random_;
  const PoolRef pool_;
  const std::vector<StreamRef> streams_;
  const std::vector<PoolPlan> plans_;
  size_t regime_ = 0;
  std::vector<Held> live_;
};

// Two ranks in one thread, each with its pool and the stream in which it computes.
struct Ranks {
  static constexpr size_t kWorld = 2;
  struct Sums {
    LeaseRef shard;
    HandleRef handle;
  };
  Ranks() {
    for (int rank = 0; rank < static_cast<int>(kWorld); ++rank) {
      pools.push_back(cuda_pool());
      comms.push_back(world.join_cuda(rank, "local", std::chrono::seconds(20), pools.back()));
    }
  }

  // The gradients of some buckets are summed; each sum is read one bucket later, and gathered.
  void run(bool is_broken = false) {
    const std::vector<StreamRef> compute = new_streams(kWorld);
    std::vector<Sums> last(kWorld);
    for (int turn = 0; turn < 5; ++turn) {
      std::vector<Sums> sums;
      for (size_t rank = 0; rank < kWorld; ++rank) {
        fake_cuda::set_place("bucket " + std::to_string(turn) + " of rank " + std::to_string(rank));
        const LeaseRef bucket = pools[rank]->acquire("bucket", kWorld * kUnit, compute[rank]);
        use(*compute[rank], bucket, true, 0);
        sums.push_back({pools[rank]->acquire("", kUnit, compute[rank]), nullptr});
        use(*compute[rank], sums[rank].shard, true, 0);
        sums[rank].handle =
            comms[rank]->reduce_scatter({{view(bucket), view(sums[rank].shard)}}, {}, nullptr, from(compute[rank]));
        bucket->release(sums[rank].handle->event());
      }
      for (size_t rank = 0; rank < kWorld && turn > 0; ++rank) {
        last[rank].handle->wait(compute[rank].get());
        last[rank].shard->release(use(*compute[rank], last[rank].shard, false, 0, is_broken));
      }
      last = std::move(sums);
    }
    gather(compute, last);
  }

  void gather(const std::vector<StreamRef>& compute, const std::vector<Sums>& last) {
    std::vector<LeaseRef> full;
    std::vector<HandleRef> handles;
    for (size_t rank = 0; rank < kWorld; ++rank) {
      last[rank].handle->wait(compute[rank].get());
      use(*compute[rank], last[rank].shard, true, 1);  // a step of the optimizer
      full.push_back(pools[rank]->acquire("full", kWorld * kUnit, compute[rank]));
      handles.push_back(comms[rank]->all_gather({{view(full[rank]), view(last[rank].shard)}}, from(compute[rank])));
      last[rank].shard->release(handles[rank]->event());
    }
    for (size_t rank = 0; rank < kWorld; ++rank) {
      handles[rank]->wait(compute[rank].get());
      full[rank]->release(use(*compute[rank], full[rank], false, 1, true));
    }
  }

  static IssueOptions from(const StreamRef& caller) {
    IssueOptions options;
    options.caller = caller;
    return options;
  }
  static View view(const LeaseRef& lease) {
    return {lease->data(), static_cast<int64_t>(lease->size_bytes() / sizeof(float)), DType::kFloat32};
  }

  LocalWorld world{static_cast<int>(kWorld)};
  std::vector<PoolRef> pools;
  std::vector<CommRef> comms;
};

// A sharded model of one rank: units are gathered, used in the stream that computes, and let go; a step writes the shards.
class ShardedModel {
 public:
  static constexpr int kCount = 5;
  ShardedModel(uint64_t seed, bool is_broken)
      : random_(seed), is_broken_(is_broken), pool_(cuda_pool()), compute_(new_streams(1)[0]) {
    comm_ = world_.join_cuda(0, "local", std::chrono::seconds(20), pool_);
    prefetch_ = static_cast<int>(random_() % 4);
    std::vector<UnitSpec> specs;
    for (int unit = 0; unit < kCount; ++unit) {
      stays_.push_back(random_() % 4 == 0);
      specs.push_back({std::to_string(unit), kUnit * (1 + random_() % 3)});
      shards_.push_back(pool_->acquire("", specs.back().size_bytes, compute_));
      use(*compute_, shards_.back(), true, 0);
    }
    specs_ = specs;
    units_ = std::make_unique<Units>(
        comm_, std::move(specs), stays_, prefetch_,
        UnitCallbacks{[this](int unit, std::byte* data, const std::shared_ptr<void>&) { return gather_of(unit, data); },
                      [](int, bool) {}, [](int, const char*) {}, [](const std::function<void()>& body) { body(); }});
    units_->set_plan({"units", {}, {}, 0, 0}, {}, compute_);
  }
  void run() {
    for (int step = 0; step < 4; ++step) {
      std::vector<int> order;
      for (int unit = 1; unit < kCount; ++unit) {
        order.push_back(unit);
      }
      if (random_() % 3 == 0) {  // leaves the record
        std::shuffle(order.begin(), order.end(), random_);
        order.resize(1 + random_() % order.size());
      }
      fake_cuda::set_place("step " + std::to_string(step));
      run_step(order, step);
      const bool is_new = units_->end_step(compute_);
      for (const LeaseRef& shard : shards_) {
        use(*compute_, shard, true, step + 1);
      }
      if (is_new) {
        plan();
      }
    }
    for (const LeaseRef& shard : shards_) {
      shard->release(compute_->record());
    }
  }
  int64_t gathers() const {
    int64_t sum = 0;
    for (const int64_t count : units_->machine().counts().gathers) {
      sum += count;
    }
    return sum;
  }

 private:
  using Kind = ResidencyEvent::Kind;
  std::shared_ptr<const Request> gather_of(int unit, std::byte* data) {
    const auto numel = static_cast<int64_t>(specs_[static_cast<size_t>(unit)].size_bytes / sizeof(float));
    const View full{data, numel, DType::kFloat32};
    const View own{shards_[static_cast<size_t>(unit)]->data(), numel, DType::kFloat32};
    return std::make_shared<Request>(comm_, comm_->checked({}, {{full, own}}, nullptr),
                                     std::vector<Handle::Keepalive>{});
  }
  void event(ResidencyEvent event, int value) {
    units_->step(event, compute_);
    if (event.needs()) {
      const Turn& turn = units_->turn(event.unit);
      compute_->run([=, this, data = turn.data, size = specs_[static_cast<size_t>(event.unit)].size_bytes] {
        fake_cuda::access(data, size, false, "parameters");
        CHECK(is_broken_ || holds_only(data, size, value));
      });
    }
  }
  void run_step(const std::vector<int>& order, int value) {
    event({Kind::kForward, 0, false, true}, value);
    for (const int unit : order) {
      event({Kind::kForward, unit, false, true}, value);
      event({Kind::kForwardEnd, unit, false, true}, value);
    }
    event({Kind::kForwardEnd, 0, false, true}, value);
    for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
      event({Kind::kBackward, *unit, true}, value);
    }
    event({Kind::kBackwardEnd, 0, true}, value);
  }
  void plan() {
    const auto intervals = residency_intervals(stays_, prefetch_, units_->machine().record(0));
    PoolPlan plan{"units", {}, {}, 0, 0};
    std::vector<int> numbers;
    std::vector<PlacementKey> keys;
    for (int unit = 0; unit < kCount; ++unit) {
      const auto& of_unit = intervals[static_cast<size_t>(unit)];
      const std::vector<LiveInterval> live(of_unit.begin(), of_unit.end());
      numbers.push_back(live.empty() ? -1 : static_cast<int>(keys.size()));
      if (!live.empty()) {
        const size_t size = specs_[static_cast<size_t>(unit)].size_bytes;
        keys.emplace_back(static_cast<int64_t>(size), live);
        plan.keys.push_back({std::to_string(unit), 0, size});
      }
    }
    const Placement placed = place_best_fit(keys);
    for (size_t key = 0; key < keys.size(); ++key) {
      plan.keys[key].offset_bytes = static_cast<size_t>(placed.offsets[key]);
    }
    plan.total_bytes = static_cast<size_t>(placed.total_bytes);
    units_->set_plan(std::move(plan), std::move(numbers), compute_);
  }

  std::mt19937_64 random_;
  const bool is_broken_;
  LocalWorld world_{1};
  const PoolRef pool_;
  const StreamRef compute_;
  CommRef comm_;
  int prefetch_ = 0;
  std::vector<uint8_t> stays_;
  std::vector<UnitSpec> specs_;
  std::vector<LeaseRef> shards_;
  std::unique_ptr<Units> units_;
};

Checked checked(uint64_t seed, uint64_t dropped, const std::function<void()>& program) {
  fake_cuda::begin_check(seed, dropped);
  program();
  return fake_cuda::end_check();
}

// Something is unordered, or nothing is. `forgotten`: a wait, as `dropped` above.
void expect_races(bool has_some, const Checked& found, uint64_t seed, uint64_t forgotten = 0) {
  if (found.races.empty() == has_some) {
    std::fprintf(stderr, "seed %llu, wait %llu:\n", static_cast<unsigned long long>(seed),
                 static_cast<unsigned long long>(forgotten));
    for (const std::string& race : found.races) {
      std::fprintf(stderr, "%s\n", race.c_str());
    }
  }
  CHECK(found.races.empty() != has_some);
}

// Forgets each wait of program(seed, is_broken) in turn: something is unordered then, unless the stream is behind what it
// would have waited for all the same. How many were needed.
uint64_t drop_each(uint64_t seeds, const std::function<void(uint64_t, bool)>& program) {
  uint64_t needed = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    uint64_t waits = checked(seed, 0, [&] { program(seed, false); }).waits;
    for (uint64_t dropped = 1; dropped <= waits; ++dropped) {
      const Checked found = checked(seed, dropped, [&] { program(seed, true); });
      expect_races(!found.is_implied, found, seed, dropped);
      waits = std::min(waits, found.waits);  // later events are seen done at other times
      needed += found.is_implied ? 0 : 1;
    }
  }
  return needed;
}

}  // namespace

TEST(nothing_is_unordered_in_random_schedules_of_the_pool) {
  uint64_t waits = 0;
  uint64_t planned = 0;
  for (uint64_t seed = 0; seed < schedules(); ++seed) {
    const Checked found = checked(seed, 0, [&] {
      Run run({.seed = seed, .is_planned = seed / 8 % 2 == 1, .poison = seed % 3 == 0, .has_idle_uses = seed % 8 < 5});
      run.run();
      planned += run.planned();
    });
    expect_races(false, found, seed);
    waits += found.waits;
  }
  CHECK(waits > 4 * schedules() && planned > 4 * schedules());
}

TEST(each_wait_of_the_pool_and_of_its_users_is_needed) {
  for (const bool is_planned : {false, true}) {
    CHECK(drop_each(60, [&](uint64_t seed, bool is_broken) { Run({seed, is_planned, is_broken}).run(); }) > 300);
  }
}

TEST(nothing_is_unordered_in_random_schedules_of_two_ranks) {
  Ranks ranks;
  for (uint64_t seed = 0; seed < schedules(); ++seed) {
    expect_races(false, checked(seed, 0, [&] { ranks.run(); }), seed);
  }
}

TEST(each_wait_of_two_ranks_is_needed) {
  Ranks ranks;
  CHECK(drop_each(30, [&](uint64_t, bool is_broken) { ranks.run(is_broken); }) > 300);
}

TEST(nothing_is_unordered_in_random_schedules_of_a_sharded_model) {
  int64_t gathers = 0;
  for (uint64_t seed = 0; seed < schedules(); ++seed) {
    expect_races(false,
                 checked(seed, 0,
                         [&] {
                           ShardedModel model(seed, false);
                           model.run();
                           gathers += model.gathers();
                         }),
                 seed);
  }
  CHECK(gathers > 10 * static_cast<int64_t>(schedules()));
}

// Waits of a gather for its caller, and of the caller for its gather, are made each time, though now and then an earlier one
// covers them.
TEST(most_waits_of_a_sharded_model_are_needed) {
  uint64_t needed = 0, waits = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    uint64_t in_run = checked(seed, 0, [&] { ShardedModel(seed, false).run(); }).waits;
    waits += in_run;
    for (uint64_t dropped = 1; dropped <= in_run; ++dropped) {
      const Checked found = checked(seed, dropped, [&] { ShardedModel(seed, true).run(); });
      needed += found.races.empty() ? 0 : 1;
      in_run = std::min(in_run, found.waits);
    }
  }
  CHECK(needed > waits / 3 && needed > 500);
}

int main(int argc, char** argv) {
  install_cuda_api(&declared(cuda_table()));
  return run_tests(argc, argv);
}
