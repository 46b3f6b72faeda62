// comm/shm_links: a peer that takes no messages holds up nobody, and hears in the end what it must.
// Run by test_native.py.
// needs: base device kernels pool comm
// runs: plain address thread
// slow: address thread
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "check.h"
#include "comm/host/shm.h"
#include "pool/upstream.h"
#include "shm_link.h"

using namespace bucketwheel;

namespace {

using Kind = LinkMessage::Kind;

constexpr uint32_t kManySlabs = 400;  // a socket of the default size takes 278 messages
// That nobody waited for the peer; on a busy machine and under sanitizers too.
constexpr std::chrono::seconds kNoWait{20};

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

TEST(links_serve_the_others_while_one_takes_no_messages) {
  ShmEnd link(3);
  Heard heard;
  std::thread peer([&] {
    sleep_until([&] {
      heard.hear_all(link.peer.get());
      return heard.next == kManySlabs;
    });
  });
  std::vector<SlabRef> slabs = announce_many(link);
  peer.join();
  CHECK(Heard::count(heard.slabs) == kManySlabs);
  slabs.clear();
  sleep_until([&] {
    heard.hear_all(link.peer.get());
    return heard.slabs == heard.ends;
  });
  const auto begin = Clock::now();
  link.others[1].reset();
  sleep_until([&] { return link.links->is_dead(3); });
  CHECK(Clock::now() - begin < kNoWait && !link.links->is_dead(1) && !link.links->is_dead(2));
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

// The links' own thread goes on with what the system would not pass for this one.
TEST(links_try_again_when_the_system_passes_no_more_files) {
  if (emulator() == "valgrind") {  // which keeps limits of descriptors to itself
    return;
  }
  ShmEnd link;
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
  const FileDescriptor full(pair[0]);
  const FileDescriptor unread(pair[1]);
  const FileDescriptor file = memfd(4096);
  std::vector<SlabRef> slabs;
  const auto upstream = make_shm_upstream([&](const SlabRef& slab) { link.links->announce(slab); });
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  std::thread([&] {
    // Without the right to pass as many as one likes; of this thread alone.
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct none[2] = {};
    CHECK(syscall(SYS_capset, &header, none) == 0);
    const rlimit few{open_files() + 16, files.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    Sent sent = Sent::kSent;
    while (sent == Sent::kSent) {
      sent = send_message(full.get(), {Kind::kSlab, 0, 4096}, file.get());
    }
    CHECK(sent == Sent::kShort);
    slabs.push_back(upstream->allocate(1));
  }).join();
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  Heard heard;
  sleep_until([&] {
    heard.hear_all(link.peer.get());
    return heard.slabs[0];
  });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
