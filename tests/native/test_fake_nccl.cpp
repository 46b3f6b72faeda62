// The fake NCCL, and our use of NCCL's functions through it: data, order, groups, failures. Run by test_native.py.
// needs: base comm device kernels pool
// with: fake_nccl/board.cpp fake_nccl/comm.cpp fake_nccl/fake_nccl.cpp fake_nccl/lives.cpp fake_nccl/script.cpp fake_nccl/windows.cpp
// link: -rdynamic
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/nccl_api.h"
#include "fake_nccl/fake_nccl.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

const NcclApi& api() {
  static const auto* const one = new std::shared_ptr<const NcclApi>(load_nccl("", "the test itself", RTLD_NOW));
  return **one;
}

void sleep_until(const std::function<bool()>& done) {
  while (!done()) {
    std::this_thread::sleep_for(1ms);
  }
}

NcclUniqueId new_id() {
  NcclUniqueId id{};
  BW_NCCL_TRY(api(), get_unique_id, &id);
  return id;
}
NcclCommRef new_comm(const NcclUniqueId& id, int rank, int world) {
  NcclCommRef comm = nullptr;
  NcclConfig config;
  config.blocking = 1;
  BW_NCCL_TRY(api(), comm_init_rank_config, &comm, world, id, rank, &config);
  return comm;
}

// Runs body(rank, comm) for each rank on a thread of its own; the communicators are destroyed afterwards.
void on_ranks(int world, const std::function<void(int, NcclCommRef)>& body) {
  const NcclUniqueId id = new_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const NcclCommRef comm = new_comm(id, rank, world);
      body(rank, comm);
      BW_NCCL_CALL(api(), comm_destroy, comm);  // a body may have ended it
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(fake_nccl_live_comms() == 0 && fake_nccl_open_groups() == 0 && fake_nccl_live_windows() == 0);
}

int async_error(NcclCommRef comm) {
  int error = -1;
  BW_NCCL_TRY(api(), comm_get_async_error, comm, &error);
  return error;
}

// A stream: a thread that runs what it is given, in order.
class Stream {
 public:
  Stream() : thread_([this] { work(); }) {}
  ~Stream() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void synchronize() {
    std::atomic<bool> is_done{false};
    push([&] { is_done = true; });
    sleep_until([&] { return is_done.load(); });
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) {
        return;
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

int launch(void* stream, void (*function)(void*), void* argument) {
  if (stream == nullptr) {
    function(argument);
  } else {
    static_cast<Stream*>(stream)->push([=] { function(argument); });
  }
  return 0;
}
struct Streams {  // while alive, device work runs in streams
  Streams() { fake_nccl_set_launch(launch, nullptr); }
  ~Streams() {
    fake_nccl_set_launch(nullptr, nullptr);
    fake_nccl_reset();
  }
};

// Values whose sums show the order of the additions.
float value(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101) * (rank == 1 ? 1e6f : 0.37f);
}

template <class T>
T as(float from) {
  return static_cast<T>(from);
}
struct BFloat16 {
  uint16_t bits;
};
template <>
BFloat16 as<BFloat16>(float from) {
  return {round_to_bf16(from)};
}

template <class T>
std::vector<T> values(int rank, size_t count) {
  std::vector<T> out(count);
  for (size_t i = 0; i < count; ++i) {
    out[i] = as<T>(value(rank, i));
  }
  return out;
}
template <class T>
bool are_equal(const T* a, const T* b, size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}

// Reduce-scatter and all-reduce have the bits of reduce_sum; all-gather and broadcast move. In place and not.
template <class T>
void check_data(DType dtype, size_t count, int world) {
  std::vector<std::vector<T>> inputs;
  std::vector<const void*> from;
  const size_t full = count * static_cast<size_t>(world);
  for (int rank = 0; rank < world; ++rank) {
    inputs.push_back(values<T>(rank, full));
  }
  for (const auto& one : inputs) {
    from.push_back(one.data());
  }
  std::vector<T> sums(full);
  reduce_sum(from.data(), world, dtype, static_cast<int64_t>(full), sums.data());
  on_ranks(world, [&](int rank, NcclCommRef comm) {
    const size_t own = count * static_cast<size_t>(rank);
    const NcclType type = nccl_type(dtype);
    for (const bool in_place : {false, true}) {
      std::vector<T> full_buffer = inputs[static_cast<size_t>(rank)];
      std::vector<T> shard_buffer(count);
      T* const shard = in_place ? full_buffer.data() + own : shard_buffer.data();
      BW_NCCL_TRY(api(), reduce_scatter, full_buffer.data(), shard, count, type, kNcclSum, comm, nullptr);
      CHECK(are_equal(shard, sums.data() + own, count));

      std::vector<T> gathered(full);
      T* const send = in_place ? gathered.data() + own : shard;
      std::copy(sums.data() + own, sums.data() + own + count, send);
      BW_NCCL_TRY(api(), all_gather, send, gathered.data(), count, type, comm, nullptr);
      CHECK(are_equal(gathered.data(), sums.data(), full));

      std::vector<T> reduced = inputs[static_cast<size_t>(rank)];
      std::vector<T> elsewhere(full);
      T* const to = in_place ? reduced.data() : elsewhere.data();
      BW_NCCL_TRY(api(), all_reduce, reduced.data(), to, full, type, kNcclSum, comm, nullptr);
      CHECK(are_equal(to, sums.data(), full));

      const int root = world - 1;
      std::vector<T> told = rank == root || !in_place ? inputs[static_cast<size_t>(rank)] : std::vector<T>(full);
      T* const heard = in_place ? told.data() : elsewhere.data();
      BW_NCCL_TRY(api(), broadcast, told.data(), heard, full, type, root, comm, nullptr);
      CHECK(are_equal(heard, inputs[static_cast<size_t>(root)].data(), full));
    }
  });
}

TEST(data) {
  for (int world = 1; world <= 4; ++world) {
    check_data<float>(DType::kFloat32, 1000, world);
    check_data<BFloat16>(DType::kBFloat16, 999, world);
    check_data<double>(DType::kFloat64, 17, world);
    check_data<float>(DType::kFloat32, 0, world);
  }
  check_data<float>(DType::kFloat32, 200001, 3);  // more than a stage
}

TEST(other_reductions) {
  on_ranks(3, [](int rank, NcclCommRef comm) {
    const auto reduced = [&](auto in, int op, NcclType type) {
      BW_NCCL_TRY(api(), all_reduce, &in, &in, 1, type, op, comm, nullptr);
      return in;
    };
    CHECK(reduced(rank + 2.0f, kNcclProd, NcclType::kFloat32) == 24.0f);
    CHECK(reduced(rank - 7.0f, kNcclMax, NcclType::kFloat32) == -5.0f);
    CHECK(reduced(int64_t{rank} - 7, kNcclMin, NcclType::kInt64) == -7);
    CHECK(reduced(rank * 5, kNcclSum, NcclType::kInt32) == 15);
    // An average is divided before it is rounded: 1 + 2^-8 + 2^-8 + ... is not lost.
    const uint16_t mean = reduced(round_to_bf16(1.0f + static_cast<float>(rank)), kNcclAvg, NcclType::kBFloat16);
    CHECK(widen_bf16(mean) == 2.0f);

    float factor = 0.3f;
    int op = -1;
    BW_NCCL_TRY(api(), red_op_create_pre_mul_sum, &op, &factor, NcclType::kFloat32, kNcclScalarHostImmediate, comm);
    factor = 100.0f;  // was read
    CHECK(reduced(rank + 1.0f, op, NcclType::kFloat32) == (1.0f * 0.3f + 2.0f * 0.3f) + 3.0f * 0.3f);
    double wrong = 1;
    CHECK(BW_NCCL_CALL(api(), all_reduce, &wrong, &wrong, 1, NcclType::kFloat64, op, comm, nullptr) == 4);
    BW_NCCL_TRY(api(), red_op_destroy, op, comm);
    CHECK(BW_NCCL_CALL(api(), red_op_destroy, op, comm) == kNcclInvalidArgument);
    BW_NCCL_TRY(api(), red_op_create_pre_mul_sum, &op, &factor, NcclType::kFloat32, kNcclScalarDevice, comm);
    factor = 2.0f;  // is read when the sum is made
    CHECK(reduced(1.0f, op, NcclType::kFloat32) == 6.0f);
  });
}

TEST(operations_of_a_communicator_run_as_they_were_issued) {
  const Streams streams;
  on_ranks(2, [](int rank, NcclCommRef comm) {
    Stream slow, fast;
    int64_t first = 1, second = 10;
    std::atomic<bool> may_start{false};
    slow.push([&] { sleep_until([&] { return may_start.load(); }); });
    // Each in another stream; the second must not overtake the first, which would be a mismatch.
    Stream* const of_first = rank == 0 ? &slow : &fast;
    Stream* const of_second = rank == 0 ? &fast : &slow;
    BW_NCCL_TRY(api(), all_reduce, &first, &first, 1, NcclType::kInt64, kNcclSum, comm, of_first);
    BW_NCCL_TRY(api(), all_reduce, &second, &second, 1, NcclType::kInt64, kNcclMax, comm, of_second);
    std::this_thread::sleep_for(20ms);
    may_start = true;
    slow.synchronize();
    fast.synchronize();
    CHECK(first == 2 && second == 10 && async_error(comm) == kNcclSuccess);
  });
}

TEST(two_communicators_run_at_one_time) {
  const Streams streams;
  for (const int shares : {0, 1}) {
    fake_nccl_reset();
    on_ranks(2, [&](int rank, NcclCommRef comm) {
      NcclCommRef child = nullptr;
      NcclConfig config;
      config.split_share = shares;
      BW_NCCL_TRY(api(), comm_split, comm, 0, rank, &child, &config);
      Stream one, other;
      int64_t a = 1, b = 2;
      // Rank 0 comes late to the first communicator's work: the second one's passes it, unless they share a queue.
      std::atomic<bool> may_start{rank == 1};
      one.push([&] { sleep_until([&] { return may_start.load(); }); });
      BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &one);
      std::atomic<bool> has_passed{false};
      BW_NCCL_TRY(api(), all_reduce, &b, &b, 1, NcclType::kInt64, kNcclSum, child, &other);
      other.push([&] { has_passed = true; });
      if (shares == 0) {
        sleep_until([&] { return has_passed.load(); });
      } else {
        std::this_thread::sleep_for(20ms);
        CHECK(rank != 0 || !has_passed);
      }
      may_start = true;
      one.synchronize();
      other.synchronize();
      CHECK(a == 2 && b == 4);
      BW_NCCL_TRY(api(), comm_destroy, child);
    });
    CHECK(shares == 1 || fake_nccl_max_concurrent() > 2);  // of two ranks
    CHECK(shares == 0 || fake_nccl_max_concurrent() <= 2);
  }
}

TEST(splits_have_their_colors_and_keys) {
  on_ranks(4, [](int rank, NcclCommRef comm) {
    NcclCommRef child = nullptr;
    const int color = rank == 3 ? kNcclSplitNoColor : rank % 2;
    BW_NCCL_TRY(api(), comm_split, comm, color, -rank, &child, nullptr);
    CHECK((child == nullptr) == (rank == 3));
    if (child != nullptr) {
      int world = 0, own = -1, device = -1;
      BW_NCCL_TRY(api(), comm_count, child, &world);
      BW_NCCL_TRY(api(), comm_user_rank, child, &own);
      BW_NCCL_TRY(api(), comm_cu_device, child, &device);
      CHECK(world == (rank == 1 ? 1 : 2) && own == (rank == 0 ? 1 : 0) && device == 0);
      BW_NCCL_TRY(api(), comm_destroy, child);
    }
  });
}

TEST(groups) {
  const Streams streams;
  on_ranks(2, [](int rank, NcclCommRef comm) {
    Stream one, other;
    int64_t a = rank, b = 10, c = 100;
    BW_NCCL_TRY(api(), group_start);
    BW_NCCL_TRY(api(), group_start);
    BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &one);
    BW_NCCL_TRY(api(), group_end);
    std::this_thread::sleep_for(5ms);
    CHECK(a == rank && fake_nccl_open_groups() > 0);  // nothing runs before the outermost end
    BW_NCCL_TRY(api(), all_reduce, &b, &b, 1, NcclType::kInt64, kNcclSum, comm, &other);
    // A refused argument concerns its own call only.
    CHECK(BW_NCCL_CALL(api(), all_reduce, nullptr, &c, 1, NcclType::kInt64, kNcclSum, comm, &one) == 4);
    // The group's work waits for what is in each of its streams, and each of them waits for it.
    std::atomic<bool> may_start{false};
    other.push([&] { sleep_until([&] { return may_start.load(); }); });
    BW_NCCL_TRY(api(), all_reduce, &c, &c, 1, NcclType::kInt64, kNcclSum, comm, &other);
    BW_NCCL_TRY(api(), group_end);
    std::this_thread::sleep_for(10ms);
    one.push([&] { CHECK(may_start && a == 1 && b == 20 && c == 200); });
    may_start = true;
    other.synchronize();
    one.synchronize();
    CHECK(a == 1 && b == 20 && c == 200);
  });
  CHECK_THROWS(NcclError, "ncclGroupEnd: 5 invalid usage; ncclGroupEnd: no group is open",
               BW_NCCL_TRY(api(), group_end));
}

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
    Stream stream;
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

TEST(a_revoked_communicator_can_be_shrunk) {
  const Streams streams;
  on_ranks(3, [](int rank, NcclCommRef comm) {
    Stream stream;
    int64_t a = 1;
    if (rank == 1) {
      BW_NCCL_TRY(api(), comm_abort, comm);  // dies
      return;
    }
    BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream);
    BW_NCCL_TRY(api(), comm_revoke, comm, kNcclRevokeDefault);
    stream.synchronize();
    CHECK(BW_NCCL_CALL(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, comm, &stream) == 5);
    CHECK(BW_NCCL_CALL(api(), comm_finalize, comm) == kNcclInvalidUsage);
    NcclCommRef child = nullptr;
    int excluded = 1;
    BW_NCCL_TRY(api(), comm_shrink, comm, &excluded, 1, &child, nullptr, kNcclShrinkAbort);
    BW_NCCL_TRY(api(), all_reduce, &a, &a, 1, NcclType::kInt64, kNcclSum, child, &stream);
    stream.synchronize();
    CHECK(a == 2);
    BW_NCCL_TRY(api(), comm_finalize, child);
    BW_NCCL_TRY(api(), comm_destroy, child);
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
