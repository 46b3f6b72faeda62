// comm/: chunks, sinks, values, failures, on threads and on forked processes. Run by test_native.py.
// needs: base device kernels pool comm
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "comm/chunks.h"
#include "comm/comm_local.h"
#include "comm/comm_shm.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

using Floats = std::vector<float>;

// Values whose sums show the order of the additions.
float value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101) * (rank == 1 ? 1e6f : 0.37f); }

Segment segment(void* full, void* shard, int64_t shard_numel, int world, DType dtype = DType::kFloat32) {
  return {{full, shard_numel * world, dtype}, {shard, shard_numel, dtype}};
}

// Runs body(comm) for every rank of a local world on threads of their own.
void on_threads(int world, bool stages_inputs, std::chrono::nanoseconds timeout,
                const std::function<void(Comm&)>& body) {
  LocalWorld place(world, stages_inputs);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const CommRef comm = place.join(rank, "local", timeout);
      body(*comm);
      comm->close();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Connected sockets between all ranks: [rank][peer].
std::vector<std::vector<int>> connect_all(int world) {
  std::vector<std::vector<int>> sockets(static_cast<size_t>(world), std::vector<int>(static_cast<size_t>(world), -1));
  for (size_t a = 0; a < sockets.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  return sockets;
}

CommRef join_shm(int rank, std::vector<int> sockets, std::vector<pid_t> pids) {
  ShmOptions options;
  options.rank = rank;
  options.world = static_cast<int>(sockets.size());
  options.sockets = std::move(sockets);
  options.pids = std::move(pids);
  options.name = "shm";
  options.timeout = 20s;
  return make_shm_comm(options);
}

struct CheckSink final : ReduceSink {
  explicit CheckSink(std::vector<Floats*> shards) : shards(std::move(shards)) {}
  bool takes(DType dtype) const override { return dtype != DType::kFloat64; }
  void consume(size_t index, int64_t begin, const void* sums, int64_t numel) override {
    const auto* const sum = static_cast<const float*>(sums);
    CHECK(index == segment || (index > segment && at == static_cast<int64_t>(shards[segment]->size())));
    at = index == segment ? at : 0;
    segment = index;
    const auto size = static_cast<int64_t>(shards[index]->size());
    CHECK(begin == at && begin % kSinkBlockNumel == 0 && (numel % kSinkBlockNumel == 0 || begin + numel == size));
    std::memcpy(shards[index]->data() + begin, sum, static_cast<size_t>(numel) * sizeof(float));
    at += numel;
  }
  std::vector<Floats*> shards;
  size_t segment = 0;
  int64_t at = 0;
};

// Gathers and reduces, foreign or from the pool, large enough for several chunks; checks every element.
void check_values(Comm& comm, int64_t numel, bool uses_pool) {
  const int world = comm.world();
  const int rank = comm.rank();
  const size_t full_bytes = static_cast<size_t>(numel * world) * sizeof(float);
  LeaseRef lease = comm.pool()->acquire("", full_bytes);
  Floats foreign(static_cast<size_t>(numel * world));
  float* full = uses_pool ? reinterpret_cast<float*>(lease->data()) : foreign.data();
  float* own = full + rank * numel;

  for (int64_t i = 0; i < numel; ++i) {
    own[i] = value(rank, i);
  }
  const Segment gathered = segment(full, own, numel, world);
  comm.all_gather({gathered}, {})->synchronize();
  for (int r = 0; r < world; ++r) {
    for (int64_t i = 0; i < numel; ++i) {
      CHECK(full[r * numel + i] == value(r, i));
    }
  }

  for (int64_t i = 0; i < numel * world; ++i) {
    full[i] = value(rank, i);
  }
  Floats shard(static_cast<size_t>(numel));
  Floats by_sink(static_cast<size_t>(numel));
  const Segment plain = segment(full, shard.data(), numel, world);
  const Segment sunk = segment(full, nullptr, numel, world);
  auto sink = std::make_shared<CheckSink>(std::vector<Floats*>{&by_sink});
  const HandleRef first = comm.reduce_scatter({plain}, {}, nullptr, {});
  const HandleRef second = comm.reduce_scatter({sunk}, {}, std::move(sink), {});
  second->synchronize();
  CHECK(first->query());
  for (int64_t i = 0; i < numel; ++i) {
    float sum = value(0, rank * numel + i);
    for (int r = 1; r < world; ++r) {
      sum += value(r, rank * numel + i);
    }
    CHECK(shard[static_cast<size_t>(i)] == sum && by_sink[static_cast<size_t>(i)] == sum);
  }
  lease->release();
}

void check_agreement(Comm& comm) {
  for (int round = 0; round < 20; ++round) {
    const std::string mine = std::string(static_cast<size_t>(round), 'x') + std::to_string(comm.rank());
    comm.post(std::as_bytes(std::span(mine)));
    const auto all = comm.collect();
    for (int r = 0; r < comm.world(); ++r) {
      const auto& payload = all[static_cast<size_t>(r)];
      CHECK(payload.size() == static_cast<size_t>(round) + 1 && static_cast<char>(payload.back()) == '0' + r);
    }
  }
}

}  // namespace

TEST(chunks_cover_everything_once_in_order) {
  constexpr size_t kWindow = size_t{64} << 10;
  std::vector<Segment> segments;
  for (const int64_t numel : {0, 1, 5000, 40'000, 0, 3, 4096, 4097, 16'384, 100'000}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kUInt8}) {
      segments.push_back({{nullptr, 2 * numel, dtype}, {nullptr, numel, dtype}});
    }
  }
  Operation op;
  op.segments = segments;
  const Chunks chunks(op, kWindow);
  CHECK(chunks.count() > 10);
  size_t index = 0;
  int64_t at = 0;
  const auto skip_complete = [&] {
    while (index < segments.size() && at == segments[index].shard.numel) {
      ++index;
      at = 0;
    }
  };
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    size_t used = 0;
    CHECK(chunks.begin(chunk) != chunks.end(chunk));
    for (const Piece* piece = chunks.begin(chunk); piece != chunks.end(chunk); ++piece) {
      skip_complete();
      CHECK(piece->segment == index && piece->begin == at && piece->begin % kSinkBlockNumel == 0 && piece->numel > 0);
      CHECK(piece->offset_bytes >= used && piece->offset_bytes % kCacheLineBytes == 0);
      used = piece->offset_bytes + static_cast<size_t>(piece->numel) * size_of(segments[index].shard.dtype);
      CHECK(used <= kWindow);
      at += piece->numel;
    }
  }
  skip_complete();
  CHECK(index == segments.size());
  op.segments.clear();
  CHECK(Chunks(op, kWindow).count() == 0);
}

TEST(threads_compute_the_same_direct_and_staged) {
  for (const bool stages_inputs : {false, true}) {
    for (int world = 1; world <= 4; ++world) {
      on_threads(world, stages_inputs, 20s, [](Comm& comm) {
        for (const int64_t numel : {1, 4095, 70'001}) {
          check_values(comm, numel, false);
        }
        check_agreement(comm);
      });
    }
  }
}

TEST(mixed_lists_and_a_sink_over_several_segments) {
  on_threads(3, true, 20s, [](Comm& comm) {
    Floats a(3 * 10'000, 1.0f), b(3 * 3, 2.0f), c(3 * 50'000, 4.0f);
    Floats out_a(10'000), out_b(3), out_c(50'000);
    const std::vector<Segment> segments = {segment(a.data(), nullptr, 10'000, 3), segment(b.data(), nullptr, 3, 3),
                                           segment(c.data(), nullptr, 50'000, 3)};
    auto sink = std::make_shared<CheckSink>(std::vector<Floats*>{&out_a, &out_b, &out_c});
    comm.reduce_scatter(segments, {}, std::move(sink), {})->synchronize();
    CHECK(out_a == Floats(10'000, 3.0f) && out_b == Floats(3, 6.0f) && out_c == Floats(50'000, 12.0f));
  });
}

TEST(shm_between_threads_of_one_process) {
  for (int world = 1; world <= 3; ++world) {
    const auto sockets = connect_all(world);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        const std::vector<pid_t> pids(static_cast<size_t>(world), getpid());
        const CommRef comm = join_shm(rank, sockets[static_cast<size_t>(rank)], pids);
        for (const bool uses_pool : {true, false}) {
          check_values(*comm, 1, uses_pool);
          check_values(*comm, 200'000, uses_pool);
        }
        check_values(*comm, 30'000, comm->rank() == 0);  // direct for one, staged for the others
        check_agreement(*comm);
        comm->close();
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(a_killed_process_is_seen_by_the_others) {
  constexpr int kWorld = 3;
  const auto sockets = connect_all(kWorld);
  int gates[2];  // the children learn each other's pids
  CHECK(pipe(gates) == 0);
  std::vector<pid_t> pids = {getpid()};
  for (int rank = 1; rank < kWorld; ++rank) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      pids.resize(kWorld);
      CHECK(read(gates[0], pids.data(), kWorld * sizeof(pid_t)) == kWorld * sizeof(pid_t));
      for (int other = 0; other < kWorld; ++other) {
        for (const int fd : sockets[static_cast<size_t>(other)]) {
          if (other != rank && fd >= 0) {
            close(fd);
          }
        }
      }
      const CommRef comm = join_shm(rank, sockets[static_cast<size_t>(rank)], pids);
      check_values(*comm, 50'000, true);
      if (rank == 2) {
        kill(getpid(), SIGKILL);
      }
      CHECK_THROWS(PeerError, "rank 2", check_values(*comm, 50'000, false));
      _Exit(0);
    }
    pids.push_back(child);
  }
  for (int rank = 1; rank < kWorld; ++rank) {
    CHECK(write(gates[1], pids.data(), kWorld * sizeof(pid_t)) == kWorld * sizeof(pid_t));
    for (const int fd : sockets[static_cast<size_t>(rank)]) {
      if (fd >= 0) {
        close(fd);
      }
    }
  }
  {
    const CommRef comm = join_shm(0, sockets[0], pids);
    check_values(*comm, 50'000, true);
    const auto begin = Clock::now();
    CHECK_THROWS(PeerError, "rank 2", check_values(*comm, 50'000, true));
    CHECK(Clock::now() - begin < 2s);
    CHECK_THROWS(PeerError, "died", comm->post({}));
    int status = 0;
    CHECK(waitpid(pids[1], &status, 0) == pids[1] && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(waitpid(pids[2], &status, 0) == pids[2] && WIFSIGNALED(status));
  }
}

TEST(abort_and_timeout_reach_those_who_wait) {
  on_threads(2, false, 200ms, [](Comm& comm) {
    Floats full(8), shard(4);
    const Segment item = segment(full.data(), shard.data(), 4, 2);
    if (comm.rank() == 0) {
      CHECK_THROWS(CommTimeout, "rank 1", comm.all_gather({item}, {})->synchronize());
      CHECK_THROWS(CommTimeout, "seq 1", comm.all_gather({item}, {}));
    } else {
      std::this_thread::sleep_for(600ms);
    }
  });
  on_threads(2, false, 20s, [](Comm& comm) {
    Floats full(8), shard(4);
    const Segment item = segment(full.data(), shard.data(), 4, 2);
    if (comm.rank() == 0) {
      CHECK_THROWS(CommError, "aborted by rank 1: no more", comm.all_gather({item}, {})->synchronize());
    } else {
      std::this_thread::sleep_for(50ms);
      comm.abort("no more");
    }
  });
}

TEST(late_ranks_do_not_read_what_a_failed_rank_has_freed) {
  for (int i = 0; i < 20; ++i) {
    on_threads(2, false, 20s, [i](Comm& comm) {
      constexpr int64_t kNumel = 100'000;
      auto memory = std::make_shared<Floats>(3 * kNumel);
      const Segment item = segment(memory->data(), memory->data() + 2 * kNumel, kNumel, 2);
      IssueOptions options;
      options.keepalive.push_back(std::move(memory));
      try {
        if (comm.rank() == 1) {
          std::this_thread::sleep_for(i * 20us);
          comm.all_gather({item}, options)->synchronize();
        } else {
          std::thread aborter([&] {
            std::this_thread::sleep_for(i * 10us);
            comm.abort("enough");
          });
          options.after.clear();
          try {
            comm.all_gather({item}, options)->synchronize();
          } catch (const CommError&) {
          }
          aborter.join();
        }
      } catch (const CommError& error) {
        CHECK(std::strstr(error.what(), "enough") != nullptr);
      }
    });
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
