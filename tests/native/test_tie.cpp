// comm/tie: what its end promises. What it passes on: conformance/collectives/test_replicas.py. Run by test_native.py.
// needs: base device kernels pool comm
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "comm/host/local.h"
#include "comm/peers/tie.h"
#include "comm/peers/watchdog.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

// One rank, alone in two communicators.
struct Alone {
  LocalWorld shards{1, false};
  LocalWorld replicas{1, false};
  CommRef shard = shards.join(0, "shard", 10s);
  CommRef replicate = replicas.join(0, "replicate", 10s);
};

std::string error_of(const Comm& comm) {
  try {
    comm.expect_usable();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Keeps the watchdog inside a look, with whatever is watched by now in its hands.
class Busy {
 public:
  Busy() {
    sleep_until([this] { return is_inside_.load(); });
  }
  ~Busy() {
    may_end_ = true;
    watch_->stop();
  }

 private:
  std::atomic<bool> is_inside_{false};
  std::atomic<bool> may_end_{false};
  std::shared_ptr<Watch> watch_ = watch([this] {
    is_inside_ = true;
    sleep_until([this] { return may_end_.load(); });
  });
};

TEST(its_end_looks_though_the_watchdog_does_not) {
  Alone rank;
  auto tie = std::make_unique<Tie>(rank.shard, rank.replicate);
  const Busy busy;
  rank.shard->abort("on fire");
  tie.reset();
  CHECK(error_of(*rank.replicate).find("on fire") != std::string::npos);
}

TEST(what_nobody_else_holds_ends_with_it_and_not_in_the_watchdog) {
  auto rank = std::make_unique<Alone>();
  const std::weak_ptr<Comm> shard = rank->shard;
  const std::weak_ptr<Comm> replicate = rank->replicate;
  auto tie = std::make_unique<Tie>(rank->shard, rank->replicate);
  const Busy busy;
  rank->shard.reset();
  rank->replicate.reset();
  CHECK(!shard.expired() && !replicate.expired());
  tie.reset();
  CHECK(shard.expired() && replicate.expired());
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
