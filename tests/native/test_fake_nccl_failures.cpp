// What goes wrong in the fake NCCL when it should: failed calls, aborts, disagreement, hangs, refused arguments and
// memory. Run by test_native.py.
// needs: base comm device kernels pool fake_nccl
// link: -rdynamic
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "nccl_ranks.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

TEST(a_failure_within_a_group_ends_all_of_it) {
  on_ranks(1, [](int, NcclCommRef comm) {
    int64_t a = 1;
    fake_nccl_fail("ncclAllReduce", 2, kNcclSystemError);
    fake_nccl_fail("ncclGroupEnd", 2, kNcclInternalError);
    for (const int expected : {kNcclSystemError, kNcclInternalError}) {
      int64_t out = 0;
      BW_NCCL_TRY(api(), group_start);
      BW_NCCL_TRY(api(), all_reduce, &a, &out, 1, NcclType::kInt64, kNcclSum, comm, nullptr);
      BW_NCCL_CALL(api(), all_reduce, &a, &out, 1, NcclType::kInt64, kNcclSum, comm, nullptr);
      CHECK(BW_NCCL_CALL(api(), group_end) == expected);
      CHECK(out == 0 && fake_nccl_open_groups() == 0);
    }
    CHECK(fake_nccl_calls("ncclAllReduce") == 4 && fake_nccl_calls("ncclGroupEnd") == 2);
    fake_nccl_reset();
    CHECK(fake_nccl_calls("ncclAllReduce") == 0);
  });
}

TEST(a_launch_that_fails_is_an_error_of_the_communicator) {
  on_ranks(1, [](int, NcclCommRef comm) {
    int64_t a = 1;
    fake_nccl_set_launch([](void*, void (*)(void*), void*) { return 700; }, nullptr);
    for (int i = 0; i < 2; ++i) {
      CHECK_THROWS(NcclError, "ncclAllReduce: 1 unhandled cuda error; the launch in a stream failed",
                   BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, nullptr));
    }
    CHECK(async_error(comm) == kNcclUnhandledCudaError);
    fake_nccl_set_launch(nullptr, nullptr);
  });
}

TEST(an_abort_ends_what_hangs) {
  const Streams streams;
  on_ranks(2, [](int rank, NcclCommRef comm) {
    Worker stream;
    int64_t a = 1;
    if (rank == 0) {
      fake_nccl_hang(1);
      BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream);
      BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream);
    }
    // The other rank waits for a peer that never comes.
    if (rank == 1) {
      BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream);
    }
    std::atomic<bool> is_done{false};
    stream.push([&] { is_done = true; });
    std::this_thread::sleep_for(20ms);
    CHECK(!is_done && async_error(comm) == kNcclSuccess);
    BW_NCCL_TRY(api(), comm_abort, comm);
    stream.synchronize();
    CHECK(a == 1);
    CHECK(BW_NCCL_CALL(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream) == 4);
    CHECK(BW_NCCL_CALL(api(), comm_abort, comm) == kNcclInvalidArgument);
  });
}

TEST(ranks_that_disagree_all_fail) {
  on_ranks(3, [](int rank, NcclCommRef comm) {
    std::vector<float> data(16);
    const auto type = NcclType::kFloat32;
    if (rank == 2) {
      BW_NCCL_TRY(api(), all_gather, data.data(), data.data(), 4, type, comm, nullptr);
    } else {
      BW_NCCL_TRY(api(), all_reduce, data.data(), data.data(), 4, type, kNcclSum, comm, nullptr);
    }
    CHECK(async_error(comm) == kNcclInvalidUsage);
    CHECK_THROWS(NcclError, "rank 0 calls ncclAllReduce(count 4, type 7, op 0, root 0), rank 2 calls ncclAllGather(",
                 BW_NCCL_TRY(api(), all_reduce, data.data(), data.data(), 4, type, kNcclSum, comm, nullptr));
    BW_NCCL_TRY(api(), comm_abort, comm);
  });
}

TEST(calls_in_progress_are_polled) {
  on_ranks(1, [](int, NcclCommRef comm) {
    int64_t a = 7;
    fake_nccl_in_progress(2);
    CHECK(BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, nullptr) == kNcclInProgress);
    CHECK(BW_NCCL_CALL(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, nullptr) == 4);
    CHECK(async_error(comm) == kNcclInProgress && async_error(comm) == kNcclInProgress);
    CHECK(async_error(comm) == kNcclSuccess);
    BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, nullptr);
    fake_nccl_async_error(kNcclRemoteError);
    CHECK(async_error(comm) == kNcclRemoteError);
    fake_nccl_reset();
    CHECK(async_error(comm) == kNcclSuccess);
  });
}

TEST(an_initialisation_that_does_not_block_goes_on_or_is_aborted) {
  NcclConfig config;
  config.blocking = 0;
  config.max_ctas = 8;
  const NcclUniqueId id = new_id();
  NcclCommRef comms[2] = {};
  CHECK(BW_NCCL_TRY(api(), comm_init_rank_config, &comms[1], 2, id, 1, &config) == kNcclInProgress);
  CHECK(async_error(comms[1]) == kNcclInProgress);
  CHECK(fake_nccl_last_config("max_ctas") == 8 && fake_nccl_last_config("min_ctas") == kNcclUndefined);
  CHECK(BW_NCCL_TRY(api(), comm_init_rank_config, &comms[0], 2, id, 0, &config) == kNcclInProgress);
  for (const NcclCommRef comm : comms) {
    sleep_until([&] { return async_error(comm) != kNcclInProgress; });
    CHECK(async_error(comm) == kNcclSuccess);
    BW_NCCL_TRY(api(), comm_abort, comm);
  }
  for (const int rank : {0, 1}) {  // the other one never comes
    NcclCommRef lonely = nullptr;
    BW_NCCL_TRY(api(), comm_init_rank_config, &lonely, 2, new_id(), rank, &config);
    BW_NCCL_TRY(api(), comm_abort, lonely);
  }
  CHECK(fake_nccl_live_comms() == 0);
}

TEST(calls_that_hang_are_ended_by_release_and_abort) {
  on_ranks(1, [](int, NcclCommRef comm) {
    int64_t a = 7;
    for (const bool aborts : {false, true}) {
      fake_nccl_hang_call(aborts ? "ncclGroupEnd" : "ncclAllReduce");
      std::atomic<int> result{-1};
      std::thread caller([&] {
        BW_NCCL_TRY(api(), group_start);
        const int called = BW_NCCL_CALL(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, nullptr);
        const int ended = BW_NCCL_CALL(api(), group_end);
        result = called != 0 ? called : ended;
      });
      sleep_until([] { return fake_nccl_hanging_calls() == 1; });
      CHECK(result == -1);
      if (aborts) {
        BW_NCCL_TRY(api(), comm_abort, comm);
      } else {
        fake_nccl_release();
      }
      caller.join();
      CHECK(result == (aborts ? kNcclInternalError : kNcclSuccess));
    }
  });
}

TEST(a_communicator_counts_as_alive_while_it_is_made) {
  for (const bool hangs : {true, false}) {  // inside the call, and then; or waiting for a rank that never comes
    if (hangs) {
      fake_nccl_hang_call("ncclCommInitRankConfig");
    }
    const uint64_t before = fake_nccl_calls("ncclCommInitRankConfig");
    std::atomic<bool> is_over{false};
    std::thread caller([&is_over, hangs, id = new_id()] {
      NcclCommRef comm = nullptr;
      NcclConfig config;
      const int result = BW_NCCL_CALL(api(), comm_init_rank_config, &comm, hangs ? 1 : 2, id, 0, &config);
      CHECK(result == (hangs ? kNcclSuccess : kNcclInternalError));
      CHECK(fake_nccl_live_comms() == (hangs ? 1 : 0));
      CHECK(!hangs || BW_NCCL_TRY(api(), comm_abort, comm) == kNcclSuccess);
      is_over = true;
    });
    sleep_until([&] { return fake_nccl_calls("ncclCommInitRankConfig") == before + 1; });
    CHECK(fake_nccl_live_comms() == 1);
    sleep_until([&] {
      fake_nccl_release();
      return is_over.load();
    });
    caller.join();
    CHECK(fake_nccl_live_comms() == 0);
  }
}

TEST(windows) {
  on_ranks(2, [](int rank, NcclCommRef comm) {
    void* data = nullptr;
    NcclWindowRef window = nullptr;
    BW_NCCL_TRY(api(), mem_alloc, &data, 10000);
    const auto bytes = static_cast<std::byte*>(data);
    CHECK(reinterpret_cast<uintptr_t>(data) % kNcclWindowAlignment == 0 && fake_nccl_live_bytes() >= 12288);
    alignas(4096) static std::byte foreign[4096];
    const auto refused = [&](void* what, size_t size) {
      return BW_NCCL_CALL(api(), comm_window_register, comm, what, size, &window, kNcclWindowSymmetric);
    };
    CHECK(refused(bytes + 1, 4096) == 4 && refused(foreign, 4096) == 4 && refused(bytes, 20000) == 4);
    CHECK(refused(data, static_cast<size_t>(4096 * (rank + 1))) == kNcclInvalidArgument);  // ranks differ
    BW_NCCL_TRY(api(), comm_window_register, comm, data, 10000, &window, kNcclWindowSymmetric);
    CHECK(window != nullptr && fake_nccl_live_windows() > 0);
    CHECK(refused(data, 4096) == kNcclInvalidUsage);  // twice
    CHECK(BW_NCCL_CALL(api(), mem_free, data) == kNcclInvalidUsage);
    BW_NCCL_TRY(api(), comm_window_deregister, comm, window);
    CHECK(BW_NCCL_CALL(api(), comm_window_deregister, comm, window) == kNcclInvalidArgument);
    BW_NCCL_TRY(api(), mem_free, data);
  });
  fake_nccl_null_windows(1);
  on_ranks(2, [](int, NcclCommRef comm) {
    void* data = nullptr;
    NcclWindowRef window = reinterpret_cast<NcclWindowRef>(&data);
    BW_NCCL_TRY(api(), mem_alloc, &data, 4096);
    BW_NCCL_TRY(api(), comm_window_register, comm, data, 4096, &window, kNcclWindowSymmetric);
    CHECK(window == nullptr);
    BW_NCCL_TRY(api(), mem_free, data);
  });
  CHECK(fake_nccl_live_bytes() == 0);
  fake_nccl_reset();
}

TEST(bad_arguments_are_refused) {
  NcclCommRef comm = nullptr;
  NcclConfig config;
  const NcclUniqueId id = new_id();
  const auto init = [&](int rank, int world) {
    return BW_NCCL_CALL(api(), comm_init_rank_config, &comm, world, id, rank, &config);
  };
  CHECK(init(2, 2) == 4 && init(-1, 2) == 4 && init(0, 0) == 4);
  config.magic = 0;
  CHECK(init(0, 1) == kNcclInvalidArgument);
  config = NcclConfig();
  config.min_ctas = 9, config.max_ctas = 8;
  CHECK(init(0, 1) == kNcclInvalidArgument);
  config = NcclConfig();
  config.cta_policy = kNcclCtaPolicyZero;
  fake_nccl_set_version(22700);
  CHECK(init(0, 1) == kNcclInvalidArgument);
  fake_nccl_set_version(23007);
  CHECK(BW_NCCL_CALL(api(), comm_init_rank_config, &comm, 1, NcclUniqueId{}, 0, &config) == 4);
  CHECK(BW_NCCL_CALL(api(), get_unique_id, nullptr) == 4 && BW_NCCL_CALL(api(), get_version, nullptr) == 4);
  on_ranks(1, [](int, NcclCommRef comm) {
    int64_t a = 1;
    const auto call = [&](void* to, NcclType type, int op, NcclCommRef comm) {
      return BW_NCCL_CALL(api(), all_reduce, &a, to, 1, type, op, comm, nullptr);
    };
    CHECK(call(nullptr, NcclType::kInt64, 0, comm) == 4 && call(&a, static_cast<NcclType>(77), 0, comm) == 4);
    CHECK(call(&a, NcclType::kInt64, 99, comm) == 4 && call(&a, NcclType::kInt64, -1, comm) == 4);
    CHECK(call(&a, NcclType::kInt64, 0, nullptr) == 4);
    CHECK(BW_NCCL_CALL(api(), broadcast, &a, &a, 1, NcclType::kInt64, 1, comm, nullptr) == 4);
    BW_NCCL_TRY(api(), comm_finalize, comm);
    CHECK(call(&a, NcclType::kInt64, 0, comm) == kNcclInvalidUsage);
  });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
