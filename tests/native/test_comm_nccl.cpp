// comm/comm_nccl, nccl_session, inflight, peers_store: ranks that are threads, over the fake NCCL, whose work is in the
// streams of the simulated CUDA device. Run by test_native.py.
// needs: base device kernels pool comm cuda_runtime fake_cuda fibers adam_cuda adam_scalars_cuda norm_cuda norm_fold_cuda pack_cuda fake_nccl
// link: -rdynamic -Wl,--wrap=dlopen
// slow: thread
#include "comm/nccl/comm.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "bindings/cuda_table.h"
#include "check.h"
#include "comm/host/host_comm.h"
#include "comm/host/local.h"
#include "counted_cuda.h"
#include "fake_nccl/fake_nccl.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

extern "C" int fake_cuda_launch_host(void* stream, void (*function)(void*), void* argument);
extern "C" int fake_cuda_is_captured(void* stream);

// The test itself is the NCCL that is found, so that sanitizers see all of it.
extern "C" void* __real_dlopen(const char* file, int flags);
extern "C" void* __wrap_dlopen(const char* file, int flags) {
  const bool is_nccl = file != nullptr && std::string(file).find("libnccl") != std::string::npos;
  return __real_dlopen(is_nccl ? nullptr : file, is_nccl ? RTLD_NOW : flags);
}

namespace {

constexpr int64_t kNumel = 1000;

// Which of its two devices the table below is set to, in threads that are not ranks.
std::atomic<uint64_t> set_to[2];
thread_local int current_device = 0;
thread_local bool is_rank = false;

// The simulated device, twice.
const CudaApi& two_devices() {
  static const CudaApi api = [] {
    CudaApi made = cuda_table();
    made.get_device_count = [](int* count) { return *count = 2, kCudaSuccess; };
    made.get_device = [](int* device) { return *device = current_device, kCudaSuccess; };
    made.set_device = [](int device) {
      set_to[device] += is_rank ? 0 : 1;
      return current_device = device, kCudaSuccess;
    };
    return made;
  }();
  return api;
}

StreamRef default_stream() { return CudaDevice::at(0).borrow(nullptr); }

NcclOptions options() {
  NcclOptions options;
  options.pool = Pool::make(CudaDevice::at(0), make_host_upstream());
  return options;
}

void expect_gone() {
  const auto until = Clock::now() + 10s;
  while (fake_nccl_live_comms() + fake_nccl_live_windows() != 0 && Clock::now() < until) {
    fake_nccl_release();  // an initialisation in the background may wait for ranks that never come
    std::this_thread::sleep_for(1ms);
  }
  CHECK(fake_nccl_live_comms() == 0 && fake_nccl_live_windows() == 0 && fake_nccl_open_groups() == 0);
  fake_nccl_reset();
}

// Runs body(rank, peers, id) for each rank on a thread of its own.
void on_ranks(int world, std::chrono::nanoseconds timeout,
              const std::function<void(int, const PeersRef&, const NcclUniqueId&)>& body) {
  static const bool is_set_up = [] {
    install_cuda_api(&counted(two_devices()));
    fake_nccl_set_launch(fake_cuda_launch_host, fake_cuda_is_captured);
    return true;
  }();
  CHECK(is_set_up);
  NcclUniqueId id{};
  BW_NCCL_TRY(nccl_api(), get_unique_id, &id);
  LocalWorld place(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      is_rank = true;
      try {
        body(rank, std::dynamic_pointer_cast<HostComm>(place.join(rank, "threads", timeout)), id);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: uncaught: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  expect_gone();
}

void on_comms(int world, std::chrono::nanoseconds timeout, const std::function<void(int, NcclComm&)>& body) {
  on_ranks(world, timeout, [&](int rank, const PeersRef& peers, const NcclUniqueId& id) {
    const auto comm = NcclComm::make(peers, 0, id, options(), Clock::now() + 20s);
    body(rank, *comm);
    comm->close(Clock::now() + 5s);
  });
}

// An all-gather of `value` + rank and its buffers.
struct Gathering {
  Gathering(NcclComm& comm, float value, const StreamRef& caller = default_stream())
      : shard(std::make_shared<std::vector<float>>(kNumel, value + static_cast<float>(comm.rank()))),
        full(std::make_shared<std::vector<float>>(static_cast<size_t>(comm.world()) * kNumel)) {
    const TensorPair pair{{full->data(), comm.world() * kNumel, DType::kFloat32},
                          {shard->data(), kNumel, DType::kFloat32}};
    IssueOptions options;
    options.caller = caller;
    options.keepalive = {shard, full};
    handle = comm.all_gather({pair}, options);
  }
  void expect(float value) const {
    for (size_t i = 0; i < full->size(); ++i) {
      CHECK((*full)[i] == value + static_cast<float>(i / kNumel));
    }
  }
  std::shared_ptr<std::vector<float>> shard;
  std::shared_ptr<std::vector<float>> full;
  HandleRef handle;
};

// Ranks of one process share the issue mutex of the device, which collective calls of the host hold: a pair is for ranks
// that are processes, and for one.
TEST(operations_in_flight_from_two_communicators) {
  on_ranks(1, 20s, [](int, const PeersRef& peers, const NcclUniqueId& id) {
    auto [gathers, reduces] = NcclComm::pair(peers, 0, id, options(), Clock::now() + 20s);
    std::vector<Gathering> all;
    for (int step = 0; step < 20; ++step) {
      all.emplace_back(*(step % 2 == 0 ? gathers : reduces), static_cast<float>(step));
    }
    for (size_t step = 0; step < all.size(); ++step) {
      all[step].handle->synchronize();
      all[step].expect(static_cast<float>(step));
    }
    gathers->close({});
    CHECK_THROWS(ClosedError, "closed", Gathering(*gathers, 0));
    Gathering last(*reduces, 7);
    last.handle->synchronize();
    last.expect(7);
    reduces->close({});
  });
}

// What has completed is right, whatever else was going on; what has not tells why.
TEST(aborts_from_other_threads_while_operations_are_issued) {
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> failed{0};
    on_comms(2, 20s, [&](int rank, NcclComm& comm) {
      std::vector<Gathering> all;
      std::thread aborter([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(3 * round + 2 * rank));
        comm.abort("enough");
      });
      try {
        for (int step = 0; step < 100000; ++step) {
          all.emplace_back(comm, static_cast<float>(step));
        }
      } catch (const CommError& error) {
        CHECK(std::string(error.what()).find("enough") != std::string::npos);
        ++failed;  // those before it may all have completed
      }
      for (size_t step = 0; step < all.size(); ++step) {
        try {
          all[step].handle->synchronize(Clock::now() + 10s);
        } catch (const CommError&) {
          ++failed;
          continue;
        }
        all[step].expect(static_cast<float>(step));
      }
      aborter.join();
    });
    CHECK(failed > 0);
  }
}

TEST(closing_from_several_threads_with_an_operation_in_flight) {
  on_comms(2, 20s, [](int rank, NcclComm& comm) {
    if (rank == 1) {
      std::this_thread::sleep_for(300ms);
      try {
        Gathering late(comm, 1);
        late.handle->synchronize(Clock::now() + 10s);
        CHECK(false);
      } catch (const PeerError& error) {
        CHECK(error.facts.rank == 0);
      }
      return;
    }
    const Gathering one(comm, 1);
    std::vector<std::thread> closers;
    for (int i = 0; i < 3; ++i) {
      closers.emplace_back([&] { comm.close(Clock::now() + 50ms); });
    }
    CHECK_THROWS(ClosedError, "in flight", one.handle->synchronize(Clock::now() + 10s));
    for (std::thread& closer : closers) {
      closer.join();
    }
  });
}

TEST(threads_of_ours_set_no_device_but_that_of_the_communicator) {
  set_to[0] = set_to[1] = 0;
  const auto expect_set = [] {
    while (set_to[1].exchange(0) == 0) {
      std::this_thread::sleep_for(1ms);
    }
  };
  on_ranks(1, 20s, [&](int, const PeersRef& peers, const NcclUniqueId& id) {
    const auto comm = NcclComm::make(peers, 1, id, options(), Clock::now() + 20s);
    const auto part = comm->split(peers, 0, 0, options(), Clock::now() + 20s);
    expect_set();
    part->close({});
    expect_set();
    fake_nccl_hang(1);
    const Gathering stuck(*comm, 1, CudaDevice::at(1).new_stream("caller"));
    expect_set();  // by the watchdog
    comm->abort("enough");
    expect_set();
  });
  CHECK(set_to[0] == 0);
}

TEST(what_is_enqueued_while_all_is_given_up_fails_too) {
  FlightRing flight({"late", 0, 1, "nccl"});
  Inflight inflight(flight);
  float value = 0;
  const TensorPair pair{{&value, 1, DType::kFloat32}, {&value, 1, DType::kFloat32}};
  const auto op = make_operation({}, {pair}, nullptr, 0, 1);
  op->seq = 1;
  inflight.enter(op, Clock::now());
  CHECK(inflight.front() && inflight.front()->op == op);
  CHECK(inflight.give_up(std::make_exception_ptr(CommError("too late"))));
  Inflight::Item item{op, {}, default_stream()->record(), std::make_shared<Outcome>(), {}};
  const auto outcome = item.outcome;
  inflight.add(std::move(item));
  CHECK_THROWS(CommError, "too late", outcome->rethrow());
  CHECK(inflight.is_settled() && inflight.take_finished().size() == 1 && !inflight.front());
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
