// comm/comm_shm: the real transport, sockets and memfds, with ranks that are threads over one mapping of each memfd, so
// that ThreadSanitizer sees what ranks do to each other's memory. Run by test_native.py.
// needs: base device kernels pool comm
// with: tests/native/one_mapping.cpp
// link: -Wl,--wrap=mmap -Wl,--wrap=munmap
// runs: thread address
// slow: address
#include "comm/host/shm.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "comm_ranks.h"
#include "one_mapping.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

// Runs body(comm) for every rank on a thread of its own; nothing stays mapped.
void on_ranks(int world, const std::function<void(Comm&)>& body) {
  const auto sockets = connect_all(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const std::vector<pid_t> pids(static_cast<size_t>(world), getpid());
      const CommRef comm = join_shm(rank, sockets[static_cast<size_t>(rank)], pids, 40s);
      body(*comm);
      comm->close();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(shared_mappings() == 0);
}

TEST(values_direct_staged_and_mixed) {
  for (int world = 1; world <= 4; ++world) {
    const int before = mapped_again();
    on_ranks(world, [](Comm& comm) {
      for (const bool uses_pool : {true, false}) {
        check_values(comm, 1, uses_pool);
        check_values(comm, 70'001, uses_pool);
      }
      check_values(comm, 30'000, comm.rank() == 0);  // direct for one, staged for the others
      check_agreement(comm);
    });
    CHECK(world == 1 || mapped_again() > before);  // a rank that fails early may be gone before a peer maps
  }
}

// Buckets as training uses them: filled, reduced and handed on while earlier ones still run, in memory that the pool
// gives on behind a fence, and rounds of agreement beside them.
TEST(memory_is_handed_on_while_operations_run) {
  constexpr int kRounds = 60;
  constexpr int64_t kNumel = 9'000;
  on_ranks(3, [](Comm& comm) {
    const int world = comm.world();
    std::vector<Floats> sums(kRounds, Floats(kNumel));
    std::vector<HandleRef> handles;
    for (int round = 0; round < kRounds; ++round) {
      const LeaseRef lease = comm.pool()->acquire("", static_cast<size_t>(kNumel * world) * sizeof(float));
      auto* const full = reinterpret_cast<float*>(lease->data());
      for (int64_t i = 0; i < kNumel * world; ++i) {
        full[i] = value(comm.rank(), i + round);
      }
      const TensorPair item = pair(full, sums[static_cast<size_t>(round)].data(), kNumel, world);
      handles.push_back(comm.reduce_scatter({item}, {}, nullptr, {}));
      lease->release(handles.back()->event());
      if (round % 8 == 0) {
        const auto mine = static_cast<uint8_t>(comm.rank() + round);
        comm.post(std::as_bytes(std::span(&mine, 1)));
        const auto all = comm.collect();
        for (int r = 0; r < world; ++r) {
          CHECK(static_cast<int>(all[static_cast<size_t>(r)].at(0)) == r + round);
        }
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      handles[static_cast<size_t>(round)]->synchronize();
      for (int64_t i = 0; i < kNumel; ++i) {
        const int64_t at = comm.rank() * kNumel + i + round;
        float sum = value(0, at);
        for (int r = 1; r < world; ++r) {
          sum += value(r, at);
        }
        CHECK(sums[static_cast<size_t>(round)][static_cast<size_t>(i)] == sum);
      }
    }
    CHECK(comm.pool()->stats().reuses > 0);
  });
}

TEST(slabs_come_and_go_under_operations) {
  on_ranks(2, [](Comm& comm) {
    for (int64_t numel = 100; numel < 3'000'000; numel *= 9) {
      check_values(comm, numel, true);
      CHECK(comm.pool()->trim() > 0);
    }
  });
}

TEST(an_abort_in_the_middle_of_an_operation) {
  for (int i = 0; i < 15; ++i) {
    on_ranks(2, [i](Comm& comm) {
      constexpr int64_t kNumel = 50'000;
      const LeaseRef lease = comm.pool()->acquire("", 2 * kNumel * sizeof(float));
      auto* const full = reinterpret_cast<float*>(lease->data());
      std::fill_n(full, 2 * kNumel, 1.0f);
      std::thread aborter;
      if (comm.rank() == 0) {
        aborter = std::thread([&comm, i] {
          std::this_thread::sleep_for(i * 20us);
          comm.abort("enough");
        });
      } else {
        std::this_thread::sleep_for(i * 10us);
      }
      try {
        comm.all_gather({pair(full, full + comm.rank() * kNumel, kNumel, 2)}, {})->synchronize();
      } catch (const CommError& error) {
        CHECK(std::strstr(error.what(), "enough") != nullptr);
      }
      if (aborter.joinable()) {
        aborter.join();
      }
      lease->release();
    });
  }
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
