// comm/control, comm/exchange, comm/team, comm/host_comm, comm/comm_shm: whatever a peer writes into the control segment, which
// it maps, no call crashes and each ends. Run by test_native.py.
// needs: base device kernels pool comm
// runs: plain address
// slow: address
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"
#include "check.h"
#include "comm/host/control.h"
#include "comm/host/shm.h"
#include "comm/host/shm_links.h"
#include "comm_ranks.h"
#include "shm_link.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 600;
#else
constexpr int kRounds = 200;
#endif

constexpr uint32_t kSlab = 3;
constexpr size_t kSlabBytes = size_t{1} << 20;

// Rank 1 of two: nothing but its socket, the control segment and a slab.
class Impostor {
 public:
  Impostor(int socket, uint64_t seed) : socket_(socket), random_(seed) {
    LinkMessage message;
    FileDescriptor file;
    CHECK(receive_message(socket, message, file) == Received::kMessage && message.kind == LinkMessage::Kind::kControl);
    memory_ = Mapping::of_file(file.get(), message.size_bytes, true);
    const FileDescriptor slab = memfd(kSlabBytes);
    CHECK(send_message(socket, {LinkMessage::Kind::kSlab, kSlab, kSlabBytes}, slab.get()) == Sent::kSent);
  }

  RankRecord& record(int rank) { return Control(memory_->data(), 2).record(rank); }
  uint64_t any() { return random_(); }
  uint64_t pick(std::initializer_list<uint64_t> choices) { return *(choices.begin() + any() % choices.size()); }

  // Into the first operation, as rank 0 has called it, with one input in the slab.
  void enter_rightly(uint64_t offset_bytes) {
    sleep_until([&] { return record(0).entered == 1; });
    RankRecord& own = record(1);
    own.signature = record(0).signature;
    own.is_direct = 1;
    own.parts[0] = {kSlab, offset_bytes};
    own.taken = chunk_word(1, 1);
    own.finished = 1;
    own.entered = 1;
    ring(record(0));
  }

  // The same, with words of which some are wrong.
  void enter() {
    sleep_until([&] { return record(0).entered == 1; });
    RankRecord& own = record(1);
    own.signature = any() % 8 == 0 ? any() : record(0).signature;
    own.is_direct = static_cast<uint32_t>(pick({0, 1, any()}));
    own.inputs_address = any();
    for (size_t i = 0; i < 4; ++i) {
      own.parts[i].slab = static_cast<uint32_t>(any() % 8 == 0 ? any() : kSlab);
      own.parts[i].offset_bytes = pick({0, 0, 0, 64, kSlabBytes - 4, kSlabBytes, UINT64_MAX - 63, any()});
    }
    own.staged = pick({chunk_word(1, 1), chunk_word(1, 3), chunk_word(2, 0), any(), UINT64_MAX});
    own.taken = pick({0, chunk_word(1, 1), any(), UINT64_MAX});
    own.finished = pick({1, 1, any(), UINT64_MAX});
    fill(&own.description, sizeof(own.description));
    fail_sometimes();
    own.entered = pick({1, 1, 1, 1, 1, 1, 2, UINT64_MAX});
    ring(record(0));
  }

  // Into the first round of post().
  void post() {
    RankRecord& own = record(1);
    own.payload_bytes[1] = pick({0, 7, Control::kPayloadBytes, Control::kPayloadBytes + 1, UINT64_MAX, any()});
    fail_sometimes();
    own.posted = pick({1, 1, 1, any()});
    ring(record(0));
  }

  // One word of either record.
  void scribble() {
    auto* const bytes = reinterpret_cast<std::byte*>(&record(static_cast<int>(any() % 2)));
    const size_t words = any() % 2 == 0 ? offsetof(RankRecord, parts) / 8 : sizeof(RankRecord) / 8;
    const uint64_t word = pick({0, 1, any(), UINT64_MAX});
    std::memcpy(bytes + any() % words * 8, &word, sizeof(word));
  }

 private:
  void fail_sometimes() {
    if (any() % 8 == 0) {
      RankRecord& own = record(1);
      std::memset(own.failure_text, 0xff, sizeof(own.failure_text));  // neither text nor its end
      std::memset(own.failure_last_error, 'x', sizeof(own.failure_last_error));
      own.failure_rank = static_cast<int32_t>(any());
      own.failure_seq = pick({0, 1, any()});
      own.failure = static_cast<FailureKind>(pick({1, 2, 3, 4, 5, 6, 7, any()}));
    }
  }
  void fill(void* begin, size_t size_bytes) {
    auto* const bytes = static_cast<unsigned char*>(begin);
    for (size_t i = 0; i < size_bytes; ++i) {
      bytes[i] = static_cast<unsigned char>(any());
    }
  }

  FileDescriptor socket_;
  std::mt19937_64 random_;
  std::shared_ptr<Mapping> memory_;
};

// How calls ended; by their messages, for those that show how far they had come.
struct Ends {
  int good = 0;
  int timeouts = 0;
  int mismatches = 0;
  int outside_slabs = 0;
  int outside_payloads = 0;

  void count(const std::function<void()>& call) {
    try {
      call();
      ++good;
    } catch (const CommError& error) {
      const std::string said = error.what();
      CHECK(said.starts_with("[bucketwheel rank 0/2 comm 'shm' seq "));
      timeouts += dynamic_cast<const CommTimeout*>(&error) != nullptr;
      mismatches += dynamic_cast<const MismatchError*>(&error) != nullptr;
      outside_slabs += said.find(" of a slab of 1048576") != std::string::npos;
      outside_payloads += said.find("claims to have posted") != std::string::npos;
    }
  }
};

bool is_over(const Handle& handle) {
  try {
    return handle.query();
  } catch (const CommError&) {
    return true;
  }
}

HandleRef call(Comm& comm, uint64_t which, Floats& memory) {
  const auto numel = static_cast<int64_t>(memory.size() / 3);
  const Segment item = segment(memory.data(), memory.data() + 2 * numel, numel, 2);
  switch (which) {
    case 0:
      return comm.all_gather({item}, {});
    case 1:
      return comm.reduce_scatter({item}, {}, nullptr, {});
    case 2:
      return comm.reduce_scatter({item}, {ReduceOp::kAvg}, nullptr, {});
    default:
      return comm.broadcast(item.full, 1, {});
  }
}

TEST(parts_that_reach_outside_of_a_slab_are_an_error) {
  constexpr size_t kNumel = 16;
  const auto gather_from = [](uint64_t offset_bytes) {
    const auto sockets = connect_all(2);
    const CommRef comm = join_shm(0, sockets[0], {getpid(), getpid()});
    Impostor peer(sockets[1][0], 0);
    Floats memory(3 * kNumel, 1.0f);
    const HandleRef handle = call(*comm, 0, memory);
    peer.enter_rightly(offset_bytes);
    handle->synchronize();
    CHECK(memory[0] == 1.0f && memory[kNumel] == 0.0f);
  };
  gather_from(0);
  gather_from(kSlabBytes - kNumel * sizeof(float));
  for (const uint64_t offset_bytes :
       {kSlabBytes - kNumel * sizeof(float) + 4, kSlabBytes, kSlabBytes + 4, UINT64_MAX - 63}) {
    CHECK_THROWS(CommError, " of a slab of 1048576", gather_from(offset_bytes));
  }
}

TEST(a_control_segment_in_which_a_peer_writes_anything) {
  const size_t files = open_files();
  Ends ends;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const auto sockets = connect_all(2);
    const CommRef comm = join_shm(0, sockets[0], {getpid(), getpid()}, 100ms);
    Impostor peer(sockets[1][0], round);
    // In one chunk, in several, and more than the peer's slab has.
    Floats memory(3 * peer.pick({5, 10'000, 100'000, 300'000}), 1.0f);
    if (round % 5 != 4) {
      const HandleRef handle = call(*comm, round % 5, memory);
      peer.enter();
      for (int i = 0; i < 100 && !is_over(*handle); ++i) {
        if (round % 2 == 0) {
          peer.scribble();
        }
      }
      ends.count([&] { handle->synchronize(); });
    } else {
      comm->post({});
      peer.post();
      ends.count([&] { comm->collect({}, {}); });
    }
    comm->close();
  }
  CHECK(open_files() == files);
  for (const int count : {ends.good, ends.timeouts, ends.mismatches, ends.outside_slabs, ends.outside_payloads}) {
    CHECK(count > 0);
  }
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
