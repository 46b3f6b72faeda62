// comm/host/shm, base/mapping: slabs that travel, files that could fault, peers that take no messages. Run by
// test_native.py.
// needs: base device kernels pool comm
// runs: plain address thread
// slow: address thread
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"
#include "check.h"
#include "comm/host/shm.h"
#include "comm/host/team.h"
#include "pool/upstream.h"

using namespace bucketwheel;

namespace {

using Kind = LinkMessage::Kind;

constexpr uint32_t kManySlabs = 400;  // a socket of the default size takes 278 messages
// That nobody waited for the peer; on a busy machine and under sanitizers too.
constexpr std::chrono::seconds kNoWait{20};

FileDescriptor memfd(size_t size_bytes, bool is_sealed = true) {
  FileDescriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(file.get(), static_cast<off_t>(size_bytes)) == 0);
  CHECK(!is_sealed || fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  return file;
}

// Rank 0 of two, and the other end of its socket.
class ShmEnd {
 public:
  ShmEnd() : record_(std::make_unique<RankRecord>()) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    std::vector<FileDescriptor> sockets(1);
    sockets.emplace_back(pair[0]);
    peer.reset(pair[1]);
    const std::vector<pid_t> pids(sockets.size(), getpid());
    links = std::make_unique<ShmLinks>(0, std::move(sockets), pids, *record_);
  }
  bool is_cut_off() const { return links->is_dead(1); }

 private:
  std::unique_ptr<RankRecord> record_;

 public:
  FileDescriptor peer;  // of rank 1
  std::unique_ptr<ShmLinks> links;
};

void send(int socket, const LinkMessage& message, int file = -1) {
  CHECK(send_message(socket, message, file) == Sent::kSent);
}

// Files that cannot serve as a slab: who needs the slab is told, with the reason.
TEST(links_refuse_files_that_could_fault) {
  const FileDescriptor unsealed = memfd(4096, false);
  const FileDescriptor file = memfd(4096);
  const auto expect_refused = [](const char* why, const LinkMessage& message, int sent) {
    ShmEnd link;
    send(link.peer.get(), message, sent);
    const FileDescriptor good = memfd(4096);
    send(link.peer.get(), {Kind::kSlab, 9, 4096}, good.get());
    sleep_until([&] {
      try {
        return link.links->slab(1, 9) != nullptr;
      } catch (const CommError&) {
        return false;
      }
    });
    CHECK_THROWS(CommError, why, link.links->slab(1, message.slab));
  };
  expect_refused("is not sealed against truncation", {Kind::kSlab, 0, 4096}, unsealed.get());
  expect_refused("has 4096 bytes, but the peer announced 4097", {Kind::kSlab, 0, 4097}, file.get());
  expect_refused("the peer announced 4096", {Kind::kSlab, 0, 4096}, -1);
}

// What was mapped keeps its size whatever its owner tries.
TEST(memfds_keep_their_size) {
  const char* failed = nullptr;
  const FileDescriptor file = try_make_memfd("test", 8192, failed);
  CHECK(file.get() >= 0 && failed == nullptr && is_size_final(file.get()));
  CHECK(ftruncate(file.get(), 0) != 0 && errno == EPERM);
  CHECK(ftruncate(file.get(), 1 << 20) != 0 && errno == EPERM);
  CHECK(fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0 && errno == EPERM);
  CHECK(!is_size_final(memfd(4096, false).get()));
  CHECK(try_make_memfd("test", size_t{1} << 63, failed).get() == -1 && std::string(failed) == "ftruncate");
}

// Slabs of a rank, by id.
std::vector<SlabRef> announce_many(ShmEnd& link) {
  const auto upstream = make_shm_upstream([&](const SlabRef& slab) { link.links->announce(slab); });
  std::vector<SlabRef> slabs;
  while (slabs.size() < kManySlabs) {
    slabs.push_back(upstream->allocate(1));
  }
  return slabs;
}

// What a peer has heard, held to what it may hear: of each slab once, and of its end once and after it.
struct Heard {
  std::vector<bool> slabs = std::vector<bool>(kManySlabs);
  std::vector<bool> ends = std::vector<bool>(kManySlabs);
  uint32_t next = 0;  // slabs come in their order
  bool has_ended = false;

  void hear_all(int socket) {
    for (;;) {
      LinkMessage message;
      FileDescriptor file;
      const Received received = receive_message(socket, message, file);
      has_ended = has_ended || received == Received::kEnd;
      if (received != Received::kMessage) {
        return;
      }
      CHECK(message.slab < kManySlabs);
      if (message.kind == Kind::kSlab) {
        CHECK(!slabs[message.slab] && message.slab >= next && file.get() >= 0 && message.size_bytes == 4096);
        slabs[message.slab] = true;
        next = message.slab + 1;
      } else {
        CHECK(message.kind == Kind::kSlabGone && slabs[message.slab] && !ends[message.slab]);
        ends[message.slab] = true;
      }
    }
  }
  static long count(const std::vector<bool>& of) { return std::count(of.begin(), of.end(), true); }
};

TEST(links_wait_for_no_peer_that_takes_no_messages) {
  ShmEnd link;
  const auto begin = Clock::now();
  std::vector<SlabRef> slabs = announce_many(link);
  CHECK(Clock::now() - begin < kNoWait);
  for (uint32_t slab = 0; slab < kManySlabs; slab += 2) {
    slabs[slab].reset();
  }
  // The watcher has looked for freed slabs, in vain, and does what else it does.
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  Heard heard;
  sleep_until([&] {
    heard.hear_all(link.peer.get());
    bool is_all = true;
    for (uint32_t slab = 0; slab < kManySlabs; ++slab) {
      is_all = is_all && (slabs[slab] != nullptr ? heard.slabs[slab] : heard.slabs[slab] == heard.ends[slab]);
    }
    return is_all;
  });
  CHECK(heard.ends[0] && Heard::count(heard.ends) < kManySlabs / 2);  // of some it never had to hear
  CHECK(Heard::count(heard.slabs) == kManySlabs / 2 + Heard::count(heard.ends));
  slabs.clear();
  sleep_until([&] {
    heard.hear_all(link.peer.get());
    return heard.slabs == heard.ends;
  });
  CHECK(!link.is_cut_off());
}

TEST(links_close_though_a_peer_takes_no_messages) {
  ShmEnd link;
  std::vector<SlabRef> slabs = announce_many(link);
  slabs.erase(slabs.begin(), slabs.begin() + 10);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  const auto begin = Clock::now();
  link.links->close();
  CHECK(Clock::now() - begin < kNoWait);
  Heard heard;
  heard.hear_all(link.peer.get());
  CHECK(heard.has_ended && heard.next > 10 && heard.next < kManySlabs);
}

TEST(joining_refuses_a_control_segment_of_another_size) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
  const FileDescriptor rank_0(pair[0]), small = memfd(4096);
  send(rank_0.get(), {Kind::kControl, 0, 1}, small.get());
  CHECK_THROWS(CommError, "rank 1/2 comm 'joining' seq 0] rank 0 sent a control segment of 1 bytes, expected",
               make_shm_comm({1, 2, {pair[1], -1}, {getpid(), getpid()}, "joining", std::chrono::milliseconds(1)}));
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
