// comm/shm_links, comm/comm_shm, base/memfd: slabs that travel, files that could fault, and how ranks join.
// Run by test_native.py.
// needs: base device kernels pool comm
// runs: plain address thread
// slow: address thread
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"
#include "check.h"
#include "comm/host/shm.h"
#include "comm/host/team.h"
#include "shm_link.h"

using namespace bucketwheel;

namespace {

using Kind = LinkMessage::Kind;

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
  ShmEnd link;
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

// Files that cannot serve as a slab: who needs the slab is told, with the reason.
TEST(links_refuse_files_that_could_fault) {
  const FileDescriptor unsealed = memfd(4096, false);
  const FileDescriptor file = memfd(4096);
  const FileDescriptor folder(open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const FileDescriptor device(open("/dev/zero", O_RDWR | O_CLOEXEC));
  const auto expect_refused = [](const char* why, const LinkMessage& message, const std::vector<int>& files) {
    ShmEnd link;
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

// Whoever sends without end keeps the watcher neither from the others nor from its end.
TEST(links_see_to_others_beside_a_peer_that_sends_without_end) {
  ShmEnd link(2);
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
  expect("rank 0 sent a control segment of 1 bytes, expected",
         [&](int peer) { send(peer, {Kind::kControl, 0, 1}, {small.get()}); });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
