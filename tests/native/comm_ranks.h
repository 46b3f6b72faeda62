// Ranks of the backends that share memory, for the tests of csrc/comm: values that show the order of additions, and
// what every rank checks.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/host/shm.h"

namespace bucketwheel {

using Floats = std::vector<float>;

// Values whose sums show the order of the additions.
inline float value(int rank, int64_t i) {
  return static_cast<float>((i * 7 + rank * 13) % 101) * (rank == 1 ? 1e6f : 0.37f);
}

inline TensorPair pair(void* full, void* shard, int64_t shard_numel, int world, DType dtype = DType::kFloat32) {
  return {{full, shard_numel * world, dtype}, {shard, shard_numel, dtype}};
}

// Connected sockets between all ranks: [rank][peer].
inline std::vector<std::vector<int>> connect_all(int world) {
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

inline CommRef join_shm(int rank, std::vector<int> sockets, std::vector<pid_t> pids,
                        std::chrono::nanoseconds timeout = std::chrono::seconds(20)) {
  ShmOptions options;
  options.rank = rank;
  options.world = static_cast<int>(sockets.size());
  options.sockets = std::move(sockets);
  options.pids = std::move(pids);
  options.name = "shm";
  options.timeout = timeout;
  return make_shm_comm(options);
}

struct CheckSink final : ReduceSink {
  explicit CheckSink(std::vector<Floats*> shards) : shards(std::move(shards)) {}
  bool takes(DType dtype) const override { return dtype != DType::kFloat64; }
  void consume(size_t index, int64_t begin, const void* sums, int64_t numel) override {
    const auto* const sum = static_cast<const float*>(sums);
    CHECK(index == pair || (index > pair && at == static_cast<int64_t>(shards[pair]->size())));
    at = index == pair ? at : 0;
    pair = index;
    const auto size = static_cast<int64_t>(shards[index]->size());
    CHECK(begin == at && begin % kSinkBlockNumel == 0 && (numel % kSinkBlockNumel == 0 || begin + numel == size));
    std::memcpy(shards[index]->data() + begin, sum, static_cast<size_t>(numel) * sizeof(float));
    at += numel;
  }
  std::vector<Floats*> shards;
  size_t pair = 0;
  int64_t at = 0;
};

// Gathers and reduces, foreign or from the pool, large enough for several chunks; checks every element.
inline void check_values(Comm& comm, int64_t numel, bool uses_pool) {
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
  const TensorPair gathered = pair(full, own, numel, world);
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
  const TensorPair plain = pair(full, shard.data(), numel, world);
  const TensorPair sunk = pair(full, nullptr, numel, world);
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

inline void check_agreement(Comm& comm) {
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

}  // namespace bucketwheel
