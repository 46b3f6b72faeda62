// comm/shm_links, comm/comm_shm, base/memfd: what a peer may send and what it may not; nothing of it ends this process or stays open.
// Run by test_native.py.
// needs: base device kernels pool comm
// runs: plain address thread
// slow: address thread
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"
#include "check.h"
#include "comm/host/control.h"
#include "comm/host/shm.h"
#include "comm/host/shm_links.h"
#include "shm_link.h"

using namespace bucketwheel;

namespace {

using Kind = LinkMessage::Kind;

#if defined(__SANITIZE_ADDRESS__)
constexpr int kFuzzedMessages = 100'000;
#else
constexpr int kFuzzedMessages = 10'000;
#endif

// Whatever bytes and descriptors; waits while the socket is full.
void send_bytes(int socket, const void* bytes, size_t size_bytes, const std::vector<int>& files) {
  iovec data{const_cast<void*>(bytes), size_bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!files.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* const passed = CMSG_FIRSTHDR(&header);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(passed), files.data(), files.size() * sizeof(int));
  }
  while (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) {
      return;  // the other side has had enough
    }
    CHECK(errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS || errno == EINTR);
    pollfd writable{socket, POLLOUT, 0};
    poll(&writable, 1, 1);
  }
}

void send(int socket, const LinkMessage& message, const std::vector<int>& files) {
  send_bytes(socket, &message, sizeof(message), files);
}

// Whether something that was sent has not been read.
bool is_unread(int socket) {
  int bytes = 0;
  CHECK(ioctl(socket, SIOCOUTQ, &bytes) == 0);
  return bytes != 0;
}

size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:") != std::string::npos;
  }
  return count;
}

// The first test: the library has made no memfd yet, so it has to ask the system whether that can seal, and cannot.
TEST(files_that_could_fault_are_refused_where_no_descriptor_is_left) {
  const FileDescriptor unsealed = memfd(4096, false);
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  const rlimit few{64, files.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<FileDescriptor> taken;
  do {
    taken.emplace_back(dup(unsealed.get()));
  } while (taken.back().get() >= 0);
  CHECK(errno == EMFILE);
  std::exception_ptr refused;  // read below: the sanitizers need descriptors for that
  try {
    Mapping::of_file(unsealed.get(), 4096, false);
  } catch (...) {
    refused = std::current_exception();
  }
  taken.clear();
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0 && refused != nullptr);
  CHECK_THROWS(CommError, "is not sealed: it could be cut off", std::rethrow_exception(refused));
  CHECK_THROWS(CommError, "is not sealed: it could be cut off", Mapping::of_file(unsealed.get(), 4096, false));
  CHECK(seals_memfds());
}

TEST(links_carry_slabs) {
  Link link;
  const FileDescriptor small = memfd(5000);
  const FileDescriptor large = memfd(3 << 20);
  send(link.peer.get(), {Kind::kSlab, 7, 5000}, {small.get()});
  send(link.peer.get(), {Kind::kSlab, 1, 3 << 20}, {large.get()});
  sleep_until([&] { return link.links->slab(1, 1) != nullptr; });
  CHECK(link.links->slab(1, 7)->size_bytes() == 5000 && link.links->slab(1, 1)->size_bytes() == 3 << 20);
  send(link.peer.get(), {Kind::kSlabGone, 7, 0}, {});
  sleep_until([&] { return link.links->slab(1, 7) == nullptr; });
  CHECK(!link.is_cut_off() && link.links->slab(1, 1) != nullptr);
}

void expect_cut_off(const char* why, const std::function<void(int)>& send_it) {
  Link link;
  send_it(link.peer.get());
  sleep_until([&] { return link.is_cut_off(); });
  if (link.links->end_of(1).find(why) == std::string::npos) {
    std::fprintf(stderr, "it says: %s\n", link.links->end_of(1).c_str());
    CHECK(!"the reason");
  }
}

TEST(links_cut_off_whoever_sends_what_no_rank_sends) {
  const FileDescriptor file = memfd(4096);
  const int fd = file.get();
  const size_t before = open_files();
  const LinkMessage slab{Kind::kSlab, 0, 4096};
  expect_cut_off("a message of 3 bytes with 0 file descriptors", [](int peer) { send_bytes(peer, "abc", 3, {}); });
  expect_cut_off("and more", [](int peer) { send_bytes(peer, std::string(99, 'x').data(), 99, {}); });
  expect_cut_off("with 2 file descriptors", [&](int peer) { send(peer, slab, {fd, fd}); });
  expect_cut_off("file descriptors, expected", [&](int peer) { send(peer, slab, {fd, fd, fd, fd, fd, fd, fd}); });
  expect_cut_off("a message of kind 77", [&](int peer) { send(peer, {static_cast<Kind>(77), 0, 0}, {}); });
  expect_cut_off("a message of kind 0", [&](int peer) { send(peer, {Kind::kControl, 0, 4096}, {fd}); });
  expect_cut_off("the end of slab 5, which it has not", [](int peer) { send(peer, {Kind::kSlabGone, 5, 0}, {}); });
  expect_cut_off("slab 0, which it has announced before", [&](int peer) {
    send(peer, slab, {fd});
    send(peer, slab, {fd});
  });
  expect_cut_off("died", [](int peer) { shutdown(peer, SHUT_RDWR); });
  CHECK(open_files() == before);
}

// Files that cannot serve as a slab: who needs the slab is told, with the reason.
TEST(links_refuse_files_that_could_fault) {
  const FileDescriptor unsealed = memfd(4096, false);
  const FileDescriptor file = memfd(4096);
  const FileDescriptor folder(open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const FileDescriptor device(open("/dev/zero", O_RDWR | O_CLOEXEC));
  const auto expect_refused = [](const char* why, const LinkMessage& message, const std::vector<int>& files) {
    Link link;
    send(link.peer.get(), message, files);
    const FileDescriptor good = memfd(4096);
    send(link.peer.get(), {Kind::kSlab, 9, 4096}, {good.get()});
    sleep_until([&] {
      try {
        return link.links->slab(1, 9) != nullptr;
      } catch (const CommError&) {
        return false;
      }
    });
    CHECK_THROWS(CommError, why, link.links->slab(1, message.slab));
  };
  expect_refused("is not sealed: it could be cut off", {Kind::kSlab, 0, 4096}, {unsealed.get()});
  expect_refused("has 4096 bytes, it announced 4097", {Kind::kSlab, 0, 4097}, {file.get()});
  expect_refused("it announced 18446744073709551615", {Kind::kSlab, 0, UINT64_MAX}, {file.get()});
  expect_refused("cannot map shared memory of 0 bytes", {Kind::kSlab, 0, 0}, {file.get()});
  expect_refused("it announced 4096", {Kind::kSlab, 0, 4096}, {});
  expect_refused("it announced 4096", {Kind::kSlab, 0, 4096}, {device.get()});
  expect_refused("could be cut off", {Kind::kSlab, 0, 1}, {folder.get()});
}

// What was mapped keeps its size whatever its owner tries.
TEST(memfds_keep_their_size) {
  const char* failed = nullptr;
  const FileDescriptor file = try_make_memfd("test", 8192, failed);
  CHECK(file.get() >= 0 && failed == nullptr && seals_memfds() && is_size_final(file.get()));
  CHECK(ftruncate(file.get(), 0) != 0 && errno == EPERM);
  CHECK(ftruncate(file.get(), 1 << 20) != 0 && errno == EPERM);
  CHECK(fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0 && errno == EPERM);
  CHECK(!is_size_final(memfd(4096, false).get()));
  CHECK(try_make_memfd("test", size_t{1} << 63, failed).get() == -1 && std::string(failed) == "ftruncate");
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed), file_(memfd(4096)), unsealed_(memfd(8192, false)) {}

  void begin_link() { known_.clear(); }
  // Of the messages that were sent, those in which anything was changed.
  int changed() const { return changed_; }

  // One message more: right, or not in one thing or several.
  void send_one(int peer) {
    LinkMessage message{Kind::kSlab, next_slab_++, 4096};
    std::vector<int> files{file_.get()};
    if (!known_.empty() && any() % 3 == 0) {
      message = {Kind::kSlabGone, known_.back(), 0};
      files.clear();
      known_.pop_back();
    } else {
      known_.push_back(message.slab);
    }
    send_changed(peer, message, std::move(files));
  }

  // In place of a control segment: what says that it is one of `size_bytes`, which no file here is, or was changed.
  void send_control(int peer, uint64_t size_bytes) {
    send_changed(peer, {Kind::kControl, 0, size_bytes}, {file_.get()});
  }

 private:
  void send_changed(int peer, LinkMessage message, std::vector<int> files) {
    auto change = [this, is_changed = false](uint64_t one_in) mutable {
      const bool is_now = any() % one_in == 0;
      changed_ += is_now && !is_changed;
      is_changed |= is_now;
      return is_now;
    };
    if (change(8)) {
      message.size_bytes = pick({0, 1, 4097, uint64_t{1} << 63, UINT64_MAX, any()});
    }
    if (change(8)) {  // sockets and terminals too, none, or too many
      const int choices[] = {unsealed_.get(), unsealed_.get(), peer, 0};
      files.assign(pick({0, 1, 1, 1, 1, 1, 2, 7}), choices[any() % std::size(choices)]);
    }
    if (change(24)) {
      message.kind = static_cast<Kind>(pick({0, 3, any()}));
    }
    if (change(24)) {
      message.slab = static_cast<uint32_t>(pick({0, message.slab - 1, any()}));
    }
    unsigned char bytes[80];
    for (unsigned char& byte : bytes) {
      byte = static_cast<unsigned char>(any());
    }
    std::memcpy(bytes, &message, sizeof(message));
    if (change(24)) {
      bytes[any() % sizeof(message)] ^= static_cast<unsigned char>(1u << any() % 8);
    }
    const size_t size_bytes = change(32) ? any() % sizeof(bytes) : sizeof(message);
    send_bytes(peer, bytes, size_bytes, files);
  }

  uint64_t any() { return random_(); }
  uint64_t pick(std::initializer_list<uint64_t> choices) { return *(choices.begin() + any() % choices.size()); }

  std::mt19937_64 random_;
  FileDescriptor file_;
  FileDescriptor unsealed_;
  uint32_t next_slab_ = 0;
  int changed_ = 0;
  std::vector<uint32_t> known_;
};

TEST(links_survive_whatever_is_sent) {
  Fuzzer fuzzer(6);
  const size_t files = open_files();
  const size_t mappings = shared_mappings();
  int sent = 0;
  int links = 0;
  for (; sent < kFuzzedMessages; ++links) {
    Link link;
    fuzzer.begin_link();
    for (int i = 0; i < 40 && !link.is_cut_off(); ++i, ++sent) {
      fuzzer.send_one(link.peer.get());
      while (!link.is_cut_off() && is_unread(link.peer.get())) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));  // a busy machine lets the watcher run
      }
    }
    if (links % 3 == 0) {  // closed while messages are on their way
      fuzzer.send_one(link.peer.get());
      fuzzer.send_one(link.peer.get());
      continue;
    }
    send_bytes(link.peer.get(), "x", 1, {});
    sleep_until([&] { return link.is_cut_off(); });
    CHECK(!link.links->end_of(1).empty());
    for (uint32_t slab = 0; slab < 20; ++slab) {
      try {
        const auto mapping = link.links->slab(1, slab);
        volatile std::byte last = mapping != nullptr ? mapping->data()[mapping->size_bytes() - 1] : std::byte{0};
        CHECK(last == std::byte{0});
      } catch (const CommError&) {  // a slab could not be had
      }
    }
  }
  CHECK(links < kFuzzedMessages / 4);  // most took several before they were cut off
  CHECK(fuzzer.changed() > sent / 4);
  CHECK(open_files() == files && shared_mappings() == mappings);
}

// Whoever sends without end keeps the watcher neither from the others nor from its end.
TEST(links_see_to_others_beside_a_peer_that_sends_without_end) {
  Link link(2);
  std::atomic<bool> must_stop{false};
  std::thread sender([&] {
    const FileDescriptor file = memfd(4096);
    while (!must_stop) {
      send(link.peer.get(), {Kind::kSlab, 0, 4096}, {file.get()});
      send(link.peer.get(), {Kind::kSlabGone, 0, 0}, {});
    }
  });
  sleep_until([&] { return link.links->slab(1, 0) != nullptr; });
  link.others[0].reset();
  sleep_until([&] { return link.links->is_dead(2); });
  CHECK(!link.is_cut_off());
  link.links->close();
  must_stop = true;
  sender.join();
}

// What rank 0 sends first is all that the others know of it: a control segment, or an error with the reason.
std::string error_of_joining(const std::function<void(int)>& send_it) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
  const FileDescriptor rank_0(pair[0]);
  send_it(rank_0.get());
  try {
    make_shm_comm({1, 2, {pair[1], -1}, {getpid(), getpid()}, "joining", std::chrono::milliseconds(1)});
    return "";
  } catch (const CommError& error) {  // PeerError and CommTimeout too
    return error.what();
  }
}

TEST(joining_refuses_whatever_is_no_control_segment) {
  const FileDescriptor small = memfd(4096);
  const auto expect = [](const std::string& why, const std::function<void(int)>& send_it) {
    const std::string said = error_of_joining(send_it);
    if (said.find(why) == std::string::npos || !said.starts_with("[bucketwheel rank 1/2 comm 'joining' seq 0]")) {
      std::fprintf(stderr, "it says: %s\n", said.c_str());
      CHECK(!"the reason");
    }
  };
  expect("rank 0 sent no control segment", [](int) {});
  expect("rank 0 hung up while", [](int peer) { shutdown(peer, SHUT_RDWR); });
  expect("rank 0 sent a message of 3 bytes", [](int peer) { send_bytes(peer, "abc", 3, {}); });
  expect("rank 0 sent a control segment of 1 bytes, expected",
         [&](int peer) { send(peer, {Kind::kControl, 0, 1}, {small.get()}); });
  const size_t size_bytes = Control::size_bytes(2);
  const FileDescriptor unsealed = memfd(size_bytes, false);
  expect("is not sealed", [&](int peer) { send(peer, {Kind::kControl, 0, size_bytes}, {unsealed.get()}); });
  expect("it announced " + std::to_string(size_bytes),
         [&](int peer) { send(peer, {Kind::kControl, 0, size_bytes}, {small.get()}); });
}

TEST(joining_survives_whatever_is_sent) {
  Fuzzer fuzzer(7);
  const size_t files = open_files();
  const size_t mappings = shared_mappings();
  int refused_files = 0;
  for (int i = 0; i < kFuzzedMessages / 10; ++i) {
    const bool is_control = i % 2 == 0;
    const std::string error = error_of_joining(
        [&](int peer) { is_control ? fuzzer.send_control(peer, Control::size_bytes(2)) : fuzzer.send_one(peer); });
    CHECK(!error.empty());
    refused_files += error.find("the control segment that rank 0 sent: ") != std::string::npos;
  }
  CHECK(refused_files > kFuzzedMessages / 40);  // half of what said that it is one
  CHECK(open_files() == files && shared_mappings() == mappings);
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
