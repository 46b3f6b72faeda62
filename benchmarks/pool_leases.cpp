// Seconds that an acquire and its release take, for bench_pool.py: one line for each sample, "case seconds".
//
//     pool_leases SAMPLES LEASES
//
// A sample is the mean over LEASES leases of 1 MiB, each released before the next one is acquired, of 250 keys in turn. The
// cases take turns.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "pool/pool.h"

using namespace bucketwheel;

namespace {

constexpr size_t kLeaseBytes = size_t{1} << 20;
constexpr int kStanding = 1000;
constexpr int kKeys = 250;

struct Case {
  const char* name;
  std::function<void(const std::string& key)> take;
};

double seconds_of(const Case& one, const std::vector<std::string>& keys) {
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& key : keys) {
    one.take(key);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() /
         static_cast<double>(keys.size());
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: pool_leases SAMPLES LEASES\n");
    return 2;
  }
  const int samples = std::atoi(words[1]);
  std::vector<std::string> keys;  // of a step, again and again
  for (int i = 0; i < std::atoi(words[2]); ++i) {
    keys.push_back("grads/" + std::to_string(i % kKeys));
  }
  const PoolRef pool = Pool::make(cpu_device(), make_host_upstream());
  const PoolRef crowded = Pool::make(cpu_device(), make_host_upstream());
  std::vector<LeaseRef> standing;  // every other one of twice as many: there are as many holes
  std::vector<LeaseRef> passing;
  for (int i = 0; i < 2 * kStanding; ++i) {
    (i % 2 == 0 ? standing : passing).push_back(crowded->acquire("", size_t(4096) * static_cast<size_t>(1 + i % 7)));
  }
  passing.clear();
  // All keys have one place, and are acquired one after the other, step after step.
  const auto with_plan = [&](bool is_strict) {
    PoolPlan plan{"step", {}, {}, kLeaseBytes, kLeaseBytes};
    for (uint32_t i = 0; i < keys.size(); ++i) {
      if (i < kKeys) {
        plan.keys.push_back({keys[i], 0, kLeaseBytes, false});
      }
      plan.order.push_back(i % kKeys);
    }
    PoolRef planned = Pool::make(cpu_device(), make_host_upstream());
    planned->adopt({plan}, is_strict);
    return planned;
  };
  const PoolRef planned = with_plan(false);
  const PoolRef strict = with_plan(true);
  const PoolRef traced = Pool::make(cpu_device(), make_host_upstream());
  const StreamRef stream = cpu_device().new_stream("bench");
  const EventRef done = stream->record();
  done->synchronize();
  const std::vector<Case> cases = {
      {"alone", [&](const std::string& key) { pool->acquire(key, kLeaseBytes)->release(); }},
      {"live", [&](const std::string& key) { crowded->acquire(key, kLeaseBytes)->release(); }},
      {"fenced", [&](const std::string& key) { pool->acquire(key, kLeaseBytes, stream)->release(done); }},
      {"planned", [&](const std::string& key) { planned->acquire(key, kLeaseBytes)->release(); }},
      {"strict", [&](const std::string& key) { strict->acquire(key, kLeaseBytes)->release(); }},
      {"traced", [&](const std::string& key) { traced->acquire(key, kLeaseBytes)->release(); }},
  };
  for (int sample = -1; sample < samples; ++sample) {  // the first one warms up
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& one = cases[(i + static_cast<size_t>(sample + 1)) % cases.size()];
      traced->begin_trace();
      const double seconds = seconds_of(one, keys);
      (void)traced->end_trace();
      strict->end_step();
      if (sample >= 0) {
        std::printf("%s %.12g\n", one.name, seconds);
      }
    }
  }
  return 0;
}
