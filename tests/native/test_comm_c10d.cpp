// comm/c10d over a process group of threads: values, packing, abort and close, for the sanitizers. What fails between hosts:
// conformance/collectives/test_comm_c10d.py. Run by test_native.py.
// needs: base device kernels pool comm
// slow: thread
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "comm/c10d/comm.h"
#include "comm/peers/store_peers.h"
#include "comm_ranks.h"
#include "gate.h"
#include "links.h"
#include "thread_group.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

constexpr const char* kId = "00000000000000ff";  // of the communicator, on all ranks

// Ranks that are threads, and tell each other at once what they failed with. Each has a Link to the next.
class Ranks {
 public:
  explicit Ranks(int world) : board(std::make_shared<Switchboard>()) {
    std::vector<std::vector<StorePeers::Neighbour>> neighbours(static_cast<size_t>(world));
    for (int rank = 0; rank < (world == 2 ? 1 : world); ++rank) {
      const int next = (rank + 1) % world;
      const auto [own, theirs] = linked();
      neighbours[static_cast<size_t>(rank)].push_back({next, own});
      neighbours[static_cast<size_t>(next)].push_back({rank, theirs});
    }
    for (int rank = 0; rank < world; ++rank) {
      StorePeers::Ways ways{[](auto) {}, [](auto, const auto&) { return StorePeers::Payloads(); },
                            std::move(neighbours[static_cast<size_t>(rank)])};
      peers.push_back(std::make_shared<StorePeers>("threads", rank, world, 30s, std::move(ways), kId));
      comms.push_back(std::make_shared<C10dComm>(peers.back(), std::make_unique<ThreadGroup>(board, rank),
                                                 Pool::make(cpu_device(), make_host_upstream())));
    }
    for (int rank = 0; rank < world; ++rank) {
      carriers_.emplace_back([this, rank] { carry(rank); });
    }
  }
  ~Ranks() {
    for (auto& comm : comms) {
      comm->close({});
    }
    for (std::thread& thread : carriers_) {
      thread.join();
    }
  }
  void run(const std::function<void(Comm&)>& body) {
    std::vector<std::thread> threads;
    for (auto& comm : comms) {
      threads.emplace_back([&body, comm] { body(*comm); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  const std::shared_ptr<Switchboard> board;
  std::vector<std::shared_ptr<StorePeers>> peers;
  std::vector<std::shared_ptr<C10dComm>> comms;

 private:
  void carry(int rank) {
    StorePeers& own = *peers[static_cast<size_t>(rank)];
    for (bool has_left = false; !has_left;) {
      has_left = own.has_left();  // before what it fails with in between
      const auto report = own.report();
      for (size_t other = 0; report && other < peers.size(); ++other) {
        if (static_cast<int>(other) != rank) {
          peers[other]->deliver(*report);
        }
      }
      if (report) {
        own.told();
      }
      std::this_thread::sleep_for(5ms);
    }
  }

  std::vector<std::thread> carriers_;
};

struct Tensors {
  explicit Tensors(int64_t numel) : shard(static_cast<size_t>(numel)), full(static_cast<size_t>(2 * numel)) {}
  std::vector<TensorPair> pairs() { return {pair(full.data(), shard.data(), static_cast<int64_t>(shard.size()), 2)}; }
  Floats shard, full;
};

TEST(c10d_values) {
  for (const int world : {2, 3, 5}) {
    Ranks ranks(world);
    ranks.run([](Comm& comm) {
      for (const int64_t numel : {0, 1, 4097, 70'000}) {
        check_values(comm, numel, false);
      }
      if (comm.world() < 5) {                  // seconds under ThreadSanitizer
        check_values(comm, 1'500'000, false);  // several messages
      }
    });
  }
}

TEST(c10d_abort_and_close) {
  Ranks ranks(2);
  Gate issued;
  ranks.run([&issued](Comm& comm) {
    Tensors tensors(1'000'000);
    if (comm.rank() == 0) {
      if (!is_inline()) {  // else rank 1 waits within its call
        issued.wait();
      }
      std::this_thread::sleep_for(50ms);  // mostly, rank 1 has begun
      comm.abort("enough");
      CHECK_THROWS(CommError, "aborted by rank 0: enough", comm.all_gather(tensors.pairs(), {}));
    } else {
      const HandleRef handle = comm.all_gather(tensors.pairs(), {});
      issued.open();
      CHECK_THROWS(PeerError, "aborted by rank 0: enough", handle->synchronize());
    }
    comm.close({});
    CHECK_THROWS(ClosedError, "closed", comm.all_gather(tensors.pairs(), {}));
  });
}

TEST(c10d_close_in_flight) {
  if (is_inline()) {
    return;  // nothing is in flight behind a call
  }
  Ranks ranks(2);
  Tensors tensors(1'000);
  const HandleRef handle = ranks.comms[0]->all_gather(tensors.pairs(), {});
  ranks.comms[0]->close(Clock::now() + 50ms);
  CHECK_THROWS(ClosedError, "closed while operations were in flight", handle->synchronize());
  sleep_until([&] { return ranks.peers[1]->trouble(0, [](int) { return false; }, "").has_value(); });
  CHECK_THROWS(PeerError, "rank 0 closed while operations were in flight",
               ranks.comms[1]->all_gather(tensors.pairs(), {})->synchronize());
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
