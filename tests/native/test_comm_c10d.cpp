// comm/c10d, outputs: values, packing, failures, over a process group of threads. Run by test_native.py.
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
  Ranks(int world, std::chrono::nanoseconds timeout) : board(std::make_shared<Switchboard>()) {
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
      peers.push_back(std::make_shared<StorePeers>("threads", rank, world, timeout, std::move(ways), kId));
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
      if (own.asks()) {
        StorePeers::Answers answers;
        for (const auto& each : peers) {
          answers.emplace_back(each->progress());
        }
        own.answer(std::move(answers));
      }
      std::this_thread::sleep_for(5ms);
    }
  }

  std::vector<std::thread> carriers_;
};

float value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101) * (rank == 1 ? 1e6f : 0.37f); }

Segment segment(std::vector<float>& full, std::vector<float>& shard) {
  return {{full.data(), static_cast<int64_t>(full.size()), DType::kFloat32},
          {shard.data(), static_cast<int64_t>(shard.size()), DType::kFloat32}};
}

struct Tensors {
  Tensors(const std::vector<int64_t>& sizes, int world) {
    for (const int64_t numel : sizes) {
      shards.emplace_back(static_cast<size_t>(numel));
      fulls.emplace_back(static_cast<size_t>(numel * world));
    }
  }
  std::vector<Segment> segments() {
    std::vector<Segment> all;
    for (size_t i = 0; i < shards.size(); ++i) {
      all.push_back(segment(fulls[i], shards[i]));
    }
    return all;
  }
  std::vector<std::vector<float>> shards;
  std::vector<std::vector<float>> fulls;
};

void check_values(Comm& comm, const std::vector<int64_t>& sizes) {
  const int world = comm.world();
  const int rank = comm.rank();
  Tensors tensors(sizes, world);
  for (auto& shard : tensors.shards) {
    for (size_t i = 0; i < shard.size(); ++i) {
      shard[i] = value(rank, static_cast<int64_t>(i));
    }
  }
  comm.all_gather(tensors.segments(), {})->synchronize();
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (int r = 0; r < world; ++r) {
      for (int64_t i = 0; i < sizes[t]; ++i) {
        CHECK(tensors.fulls[t][static_cast<size_t>(r * sizes[t] + i)] == value(r, i));
      }
    }
    for (size_t i = 0; i < tensors.fulls[t].size(); ++i) {
      tensors.fulls[t][i] = value(rank, static_cast<int64_t>(i));
    }
  }
  const HandleRef first = comm.reduce_scatter(tensors.segments(), {}, nullptr, {});
  first->synchronize();
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (int64_t i = 0; i < sizes[t]; ++i) {
      float sum = value(0, rank * sizes[t] + i);
      for (int r = 1; r < world; ++r) {
        sum += value(r, rank * sizes[t] + i);
      }
      CHECK(tensors.shards[t][static_cast<size_t>(i)] == sum);
    }
  }
  for (int root = 0; root < world; ++root) {
    std::vector<float>& tensor = tensors.fulls.back();
    for (size_t i = 0; i < tensor.size(); ++i) {
      tensor[i] = value(rank, static_cast<int64_t>(i));
    }
    comm.broadcast({tensor.data(), static_cast<int64_t>(tensor.size()), DType::kFloat32}, root, {})->synchronize();
    for (size_t i = 0; i < tensor.size(); ++i) {
      CHECK(tensor[i] == value(root, static_cast<int64_t>(i)));
    }
  }
}

TEST(c10d_values) {
  for (const int world : {2, 3, 5}) {
    Ranks ranks(world, 30s);
    ranks.run([](Comm& comm) {
      check_values(comm, {0});
      check_values(comm, {1});
      check_values(comm, {1, 0, 4097, 3, 70'000, 5});  // packed, with gaps
      if (comm.world() < 5) {                          // seconds under ThreadSanitizer
        check_values(comm, {1'500'000});               // several messages, from where the tensor is
        check_values(comm, {600'001, 700'003, 9});     // both: chunks that end inside of a tensor
      }
    });
  }
}

// What a rank sends is what its peers lack, and a little.
TEST(c10d_traffic) {
  Ranks ranks(3, 30s);
  ranks.run([](Comm& comm) {
    Tensors tensors({400'000}, 3);
    comm.all_gather(tensors.segments(), {})->synchronize();
    comm.reduce_scatter(tensors.segments(), {}, nullptr, {})->synchronize();
  });
  const size_t moved = 2 * 3 * 2 * 400'000 * sizeof(float);
  CHECK(ranks.board->sent_bytes >= moved && ranks.board->sent_bytes < moved + 20'000);
}

// An operation in another stream than the communicator's own keeps the order of issue.
TEST(c10d_streams) {
  Ranks ranks(2, 30s);
  ranks.run([](Comm& comm) {
    Tensors first({50'000}, 2);
    Tensors second({50'000}, 2);
    const StreamRef other = cpu_device().new_stream("other");
    std::fill(first.shards[0].begin(), first.shards[0].end(), 1.0f + static_cast<float>(comm.rank()));
    other->run([] { std::this_thread::sleep_for(20ms); });
    IssueOptions options;
    options.stream = other;
    comm.all_gather(first.segments(), std::move(options));
    second.shards[0] = first.shards[0];
    comm.all_gather(second.segments(), {})->synchronize();
    CHECK(first.fulls[0][0] == 1.0f && first.fulls[0].back() == 2.0f && second.fulls[0].back() == 2.0f);
    other->close();
  });
}

TEST(c10d_mismatch) {
  Ranks ranks(3, 30s);
  ranks.run([](Comm& comm) {
    Tensors tensors({comm.rank() == 2 ? 1'000 : 2'000}, 3);
    const HandleRef handle = comm.all_gather(tensors.segments(), {});
    CHECK_THROWS(MismatchError, "rank 2: all_gather of 1 tensor, 12000 bytes: float32[3000]", handle->synchronize());
    CHECK_THROWS(MismatchError, "rank 0: all_gather", comm.all_gather(tensors.segments(), {}));
  });
}

TEST(c10d_timeout) {
  Ranks ranks(3, 300ms);
  ranks.run([](Comm& comm) {
    Tensors tensors({1'000}, 3);
    comm.all_gather(tensors.segments(), {})->synchronize();
    if (comm.rank() != 1) {
      const HandleRef handle = comm.all_gather(tensors.segments(), {});
      CHECK_THROWS(CommTimeout, "Not arrived: rank 1 (last begun 1)", handle->synchronize());
    }
  });
}

TEST(c10d_abort_and_close) {
  Ranks ranks(2, 30s);
  Gate issued;
  ranks.run([&issued](Comm& comm) {
    Tensors tensors({1'000'000}, 2);
    if (comm.rank() == 0) {
      if (!is_inline()) {  // else rank 1 waits within its call
        issued.wait();
      }
      std::this_thread::sleep_for(50ms);  // mostly, rank 1 has begun
      comm.abort("enough");
      CHECK_THROWS(CommError, "aborted by rank 0: enough", comm.all_gather(tensors.segments(), {}));
    } else {
      const HandleRef handle = comm.all_gather(tensors.segments(), {});
      issued.open();
      CHECK_THROWS(PeerError, "aborted by rank 0: enough", handle->synchronize());
    }
    comm.close({});
    CHECK_THROWS(ClosedError, "closed", comm.all_gather(tensors.segments(), {}));
  });
}

TEST(c10d_close_in_flight) {
  if (is_inline()) {
    return;  // nothing is in flight behind a call
  }
  Ranks ranks(2, 30s);
  Tensors tensors({1'000}, 2);
  const HandleRef handle = ranks.comms[0]->all_gather(tensors.segments(), {});
  ranks.comms[0]->close(Clock::now() + 50ms);
  CHECK_THROWS(ClosedError, "closed while operations were in flight", handle->synchronize());
  sleep_until([&] { return ranks.peers[1]->trouble(0, [](int) { return false; }, "").has_value(); });
  CHECK_THROWS(PeerError, "rank 0 closed while operations were in flight",
               ranks.comms[1]->all_gather(tensors.segments(), {})->synchronize());
}

// The group fails while nobody says why.
TEST(c10d_broken_group) {
  if (is_inline()) {
    return;  // nothing is in flight behind a call
  }
  Ranks ranks(2, 30s);
  Tensors tensors({1'000}, 2);
  const HandleRef handle = ranks.comms[0]->all_gather(tensors.segments(), {});
  ranks.board->break_all();
  CHECK_THROWS(CommError, "the process group failed in all_gather of 1 tensor, 8000 bytes: float32[2000]: cut",
               handle->synchronize());
}

struct ThrowingSink final : ReduceSink {
  bool takes(DType) const override { return true; }
  void consume(size_t, int64_t, const void*, int64_t) override { throw ValueError("no more room"); }
};

TEST(c10d_throwing_sink) {
  Ranks ranks(2, 30s);
  ranks.run([](Comm& comm) {
    Tensors tensors({10'000}, 2);
    const auto sink = comm.rank() == 0 ? std::make_shared<ThrowingSink>() : nullptr;
    const HandleRef handle = comm.reduce_scatter(tensors.segments(), {}, sink, {});
    if (comm.rank() == 0) {
      CHECK_THROWS(CommError, "no more room", handle->synchronize());
    } else {
      sleep_until([&] { return comm.peers().trouble(0, [](int) { return false; }, "").has_value(); });
      CHECK_THROWS(CommError, "no more room", comm.all_gather(tensors.segments(), {})->synchronize());
    }
  });
}

struct WaitingSink final : ReduceSink {
  explicit WaitingSink(Gate& gate) : gate(gate) {}
  bool takes(DType) const override { return true; }
  void consume(size_t, int64_t, const void*, int64_t) override { gate.wait(); }
  Gate& gate;
};

// An operation is over on rank 0, which closes and leaves, while rank 1 still makes sums: rank 1 has all it needs.
TEST(c10d_close_waits_for_nobody) {
  if (is_inline()) {
    return;  // nothing is in flight behind a call
  }
  Ranks ranks(2, 30s);
  Gate closed;
  ranks.run([&](Comm& comm) {
    Tensors tensors({10'000}, 2);
    const auto sink = comm.rank() == 1 ? std::make_shared<WaitingSink>(closed) : nullptr;
    const HandleRef handle = comm.reduce_scatter(tensors.segments(), {}, sink, {});
    if (comm.rank() == 0) {
      handle->synchronize();
      comm.close({});
      std::this_thread::sleep_for(1200ms);  // longer than a rank waits for one that has left
      closed.open();
    } else {
      handle->synchronize();
      CHECK_THROWS(PeerError, "rank 0 has closed the communicator",
                   comm.all_gather(tensors.segments(), {})->synchronize());
    }
  });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
