// comm/: chunks, sinks, values, failures, on threads and on forked processes. Run by test_native.py.
// needs: base device kernels pool comm

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
#include "comm/host/local.h"
#include "comm_ranks.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

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

}  // namespace

TEST(chunks_cover_everything_once_in_order) {
  constexpr size_t kWindow = size_t{64} << 10;
  std::vector<TensorPair> pairs;
  for (const int64_t numel : {0, 1, 5000, 40'000, 0, 3, 4096, 4097, 16'384, 100'000}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kUInt8}) {
      pairs.push_back({{nullptr, 2 * numel, dtype}, {nullptr, numel, dtype}});
    }
  }
  Operation op;
  op.pairs = pairs;
  const Chunks chunks(op, kWindow);
  CHECK(chunks.count() > 10);
  size_t index = 0;
  int64_t at = 0;
  const auto skip_complete = [&] {
    while (index < pairs.size() && at == pairs[index].shard.numel) {
      ++index;
      at = 0;
    }
  };
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    size_t used = 0;
    CHECK(chunks.begin(chunk) != chunks.end(chunk));
    for (const Piece* piece = chunks.begin(chunk); piece != chunks.end(chunk); ++piece) {
      skip_complete();
      CHECK(piece->pair == index && piece->begin == at && piece->begin % kSinkBlockNumel == 0 && piece->numel > 0);
      CHECK(piece->offset_bytes >= used && piece->offset_bytes % kCacheLineBytes == 0);
      used = piece->offset_bytes + static_cast<size_t>(piece->numel) * size_of(pairs[index].shard.dtype);
      CHECK(used <= kWindow);
      at += piece->numel;
    }
  }
  skip_complete();
  CHECK(index == pairs.size());
  op.pairs.clear();
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

TEST(late_ranks_do_not_read_what_a_failed_rank_has_freed) {
  for (int i = 0; i < 20; ++i) {
    on_threads(2, false, 20s, [i](Comm& comm) {
      constexpr int64_t kNumel = 100'000;
      auto memory = std::make_shared<Floats>(3 * kNumel);
      const TensorPair item = pair(memory->data(), memory->data() + 2 * kNumel, kNumel, 2);
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
          } catch (const CommError&) {  // or it was done before the abort
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
