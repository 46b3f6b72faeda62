#include "comm/host/shm.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "comm/host/host_comm.h"

namespace bucketwheel {
namespace {

// How often the watcher looks for freed slabs of ours, and how often while a message waits for what poll() does not see.
constexpr int kPollMs = 1000;
constexpr int kShortPollMs = 10;

// Of one peer, before the watcher looks at the others again.
constexpr int kMostMessages = 100;

// [Note: fork], base/fork.h
void close_registered(FileDescriptor& file) {
  if (file.get() >= 0) {
    keep_in_child(file.get());
    file.reset();
  }
}

// The file that came with a message; none: -1.
FileDescriptor passed_file(msghdr& header) {
  const cmsghdr* const part = CMSG_FIRSTHDR(&header);
  int fd = -1;
  if (part != nullptr && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&fd, CMSG_DATA(part), sizeof(int));
  }
  return FileDescriptor(fd);
}

}  // namespace

Sent send_message(int socket, const LinkMessage& message, int file) {
  iovec data{const_cast<LinkMessage*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (file >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* passed = CMSG_FIRSTHDR(&header);
    passed->cmsg_level = SOL_SOCKET;
    passed->cmsg_type = SCM_RIGHTS;
    passed->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(passed), &file, sizeof(int));
  }
  ssize_t size;
  do {
    size = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  if (size >= 0) {
    return Sent::kSent;
  }
  switch (errno) {
    case EAGAIN:
      return Sent::kFull;
    case ENOBUFS:
    case ENOMEM:
    case ETOOMANYREFS:
      return Sent::kShort;
    default:
      return Sent::kEnd;
  }
}

Received receive_message(int socket, LinkMessage& message, FileDescriptor& file) {
  iovec data{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t size;
  do {
    size = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // ECONNRESET: the peer closed without reading all of ours; its last messages can still be read.
  } while (size < 0 && (errno == EINTR || errno == ECONNRESET));
  if (size < 0) {
    return errno == EAGAIN ? Received::kNothing : Received::kEnd;
  }
  file = passed_file(header);
  if (size == 0) {
    return Received::kEnd;
  }
  if (size != sizeof(message)) {
    throw CommError("a peer sent a message of " + std::to_string(size) + " bytes, expected " +
                    std::to_string(sizeof(message)) + ": run the same bucketwheel on all ranks");
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    throw CommError("a peer's memory could not be received: too many open files (raise 'ulimit -n')");
  }
  return Received::kMessage;
}

ShmLinks::ShmLinks(int rank, std::vector<FileDescriptor> sockets, std::vector<pid_t> pids, RankRecord& own)
    : rank_(rank), own_(own), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.get() < 0) {
    throw CommError("cannot make an eventfd: " + std::generic_category().message(errno));
  }
  for (size_t r = 0; r < sockets.size(); ++r) {
    auto peer = std::make_unique<Peer>();
    peer->pid = pids[r];
    if (static_cast<int>(r) != rank) {
      peer->socket = std::move(sockets[r]);
      close_in_child(peer->socket.get());
      peer->pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, peer->pid, 0)));  // older kernels: -1, sockets do
      if (peer->pidfd.get() >= 0) {
        close_in_child(peer->pidfd.get());
      }
    }
    peers_.push_back(std::move(peer));
  }
  // Signals are for the program's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  watcher_ = std::thread([this] { watch(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(watcher_.native_handle(), "bw-watcher");
}

ShmLinks::~ShmLinks() { close(); }

std::shared_ptr<Mapping> ShmLinks::slab(int rank, uint32_t id) const {
  std::lock_guard lock(slabs_mutex_);
  const Peer& peer = *peers_[static_cast<size_t>(rank)];
  if (const auto found = peer.slabs.find(id); found != peer.slabs.end()) {
    return found->second;
  }
  if (!peer.broken.empty()) {
    throw CommError("memory of rank " + std::to_string(rank) + ": " + peer.broken);
  }
  return nullptr;
}

void ShmLinks::announce(const SlabRef& slab) {
  std::lock_guard lock(send_mutex_);
  if (is_closed_) {
    return;
  }
  Announced& announced = announced_.emplace(slab->id, Announced{slab, std::vector<bool>(peers_.size())}).first->second;
  bool has_more = false;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r]->last_sent == Sent::kSent) {
      tell(r, slab->id, announced);
      has_more = has_more || peers_[r]->last_sent != Sent::kSent;
    }
  }
  if (has_more) {
    wake_watcher();
  }
}

// Tells a peer what it does not know of a slab, if it takes that. Called with send_mutex_.
void ShmLinks::tell(size_t rank, uint32_t id, Announced& announced) {
  Peer& peer = *peers_[rank];
  if (peer.socket.get() < 0 || peer.is_dead) {
    announced.is_known[rank] = false;
    return;
  }
  if (announced.is_known[rank] != announced.slab.expired()) {
    return;
  }
  const SlabRef slab = announced.slab.lock();  // its file stays open meanwhile
  if (slab == nullptr && !announced.is_known[rank]) {
    return;  // freed just now
  }
  const LinkMessage message = slab != nullptr ? LinkMessage{LinkMessage::Kind::kSlab, id, slab->size_bytes}
                                              : LinkMessage{LinkMessage::Kind::kSlabGone, id, 0};
  peer.last_sent = send_message(peer.socket.get(), message, slab != nullptr ? slab->fd : -1);
  if (peer.last_sent == Sent::kSent) {  // kEnd: the watcher sees it
    announced.is_known[rank] = slab != nullptr;
  }
}

// All that peers do not know, to those that take it. Nobody is told of what has come and gone meanwhile.
void ShmLinks::tell_peers() {
  std::lock_guard lock(send_mutex_);
  for (const auto& peer : peers_) {
    peer->last_sent = Sent::kSent;
  }
  for (auto entry = announced_.begin(); entry != announced_.end();) {
    Announced& announced = entry->second;
    for (size_t r = 0; r < peers_.size(); ++r) {
      if (peers_[r]->last_sent == Sent::kSent) {
        tell(r, entry->first, announced);
      }
    }
    const auto& is_known = announced.is_known;
    const bool is_over =
        announced.slab.expired() && std::find(is_known.begin(), is_known.end(), true) == is_known.end();
    entry = is_over ? announced_.erase(entry) : std::next(entry);
  }
}

void ShmLinks::take(Peer& peer, const LinkMessage& message, const FileDescriptor& file) {
  std::shared_ptr<Mapping> mapping;  // mapped and unmapped without the lock
  if (message.kind == LinkMessage::Kind::kSlab) {
    mapping = Mapping::of_file(file.get(), message.size_bytes, false);
  }
  std::lock_guard lock(slabs_mutex_);
  if (mapping != nullptr) {
    peer.slabs[message.slab] = std::move(mapping);
  } else if (const auto found = peer.slabs.find(message.slab); found != peer.slabs.end()) {
    mapping = std::move(found->second);
    peer.slabs.erase(found);
  }
}

// Reads what has come, of a peer that sends without end a part; `has_ended`: the process is no more, which counts once all
// that it has sent is read.
void ShmLinks::look_at(Peer& peer, bool has_ended) noexcept {
  for (int looks = 0;; ++looks) {
    if (looks == kMostMessages) {
      has_ended = false;
      break;
    }
    LinkMessage message;
    FileDescriptor file;
    try {
      const Received received = receive_message(peer.socket.get(), message, file);
      if (received == Received::kMessage) {
        take(peer, message, file);
        continue;
      }
      has_ended = has_ended || received == Received::kEnd;
      break;
    } catch (const std::exception& error) {
      std::lock_guard lock(slabs_mutex_);
      peer.broken = error.what();
    }
  }
  if (has_ended) {
    peer.is_dead = true;
  }
  ring(own_);
}

// What the watcher waits for; returns for how many milliseconds at most.
int ShmLinks::list_polled(std::vector<pollfd>& polled, std::vector<Peer*>& owners) {
  polled.assign(1, {wake_.get(), POLLIN, 0});
  owners.assign(1, nullptr);
  int timeout_ms = kPollMs;
  std::lock_guard lock(send_mutex_);
  for (const auto& peer : peers_) {
    if (peer->socket.get() < 0 || peer->is_dead) {
      continue;
    }
    const short to_send = peer->last_sent == Sent::kFull ? POLLOUT : 0;
    polled.push_back({peer->socket.get(), static_cast<short>(POLLIN | to_send), 0});
    owners.push_back(peer.get());
    if (peer->pidfd.get() >= 0) {
      polled.push_back({peer->pidfd.get(), POLLIN, 0});
      owners.push_back(peer.get());
    }
    if (peer->last_sent == Sent::kShort) {
      timeout_ms = kShortPollMs;
    }
  }
  return timeout_ms;
}

void ShmLinks::watch() noexcept {
  std::vector<pollfd> polled;
  std::vector<Peer*> owners;
  while (!must_stop_) {
    const int timeout_ms = list_polled(polled, owners);
    poll(polled.data(), polled.size(), timeout_ms);
    uint64_t wakes = 0;
    [[maybe_unused]] const ssize_t taken = read(wake_.get(), &wakes, sizeof(wakes));
    for (size_t i = 1; i < polled.size() && !must_stop_; ++i) {
      if ((polled[i].revents & ~POLLOUT) != 0 && !owners[i]->is_dead) {
        look_at(*owners[i], polled[i].fd == owners[i]->pidfd.get());
      }
    }
    tell_peers();
  }
}

void ShmLinks::wake_watcher() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void ShmLinks::close() noexcept {
  must_stop_ = true;
  wake_watcher();
  if (watcher_.joinable()) {
    watcher_.join();
  }
  std::lock_guard lock(send_mutex_);
  is_closed_ = true;
  for (const auto& peer : peers_) {
    close_registered(peer->socket);
    close_registered(peer->pidfd);
  }
}

namespace {

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(std::shared_ptr<ShmLinks> links) : links_(std::move(links)) {
    // The pool may outlive us: leases keep it.
    auto announce = [links = std::weak_ptr<ShmLinks>(links_)](const SlabRef& slab) {
      if (const auto alive = links.lock()) {
        alive->announce(slab);
      }
    };
    pool_ = Pool::make(cpu_device(), make_shm_upstream(std::move(announce)));
  }

  const char* backend() const override { return "shm"; }
  const PoolRef& pool() const override { return pool_; }

  bool describe_inputs(const Operation& op, RankRecord& own) override {
    if (op.pairs.size() > RankRecord::kMaxParts) {
      return false;
    }
    for (size_t i = 0; i < op.pairs.size(); ++i) {
      const size_t bytes = op.input_of(i).size_bytes();
      own.parts[i] = {kNoSlab, 0};
      if (bytes != 0) {
        const Pool::Location location = pool_->locate(op.inputs[i], bytes);
        if (!location.slab) {
          return false;
        }
        own.parts[i] = {location.slab->id, location.offset_bytes};
      }
    }
    return true;
  }

  bool find_inputs(int peer, const RankRecord& theirs, const Operation& op, PeerInputs& out) override {
    out.begins.assign(op.pairs.size(), nullptr);
    out.mappings.clear();  // of a look before
    uint32_t mapped_slab = kNoSlab;
    const Mapping* current = nullptr;
    for (size_t i = 0; i < op.pairs.size(); ++i) {
      const InputPart& part = theirs.parts[i];
      const size_t bytes = op.input_of(i).size_bytes();
      if (bytes == 0) {
        continue;
      }
      if (part.slab != mapped_slab || current == nullptr) {
        auto mapping = links_->slab(peer, part.slab);
        if (!mapping) {
          return false;
        }
        mapped_slab = part.slab;
        current = mapping.get();
        out.mappings.push_back(std::move(mapping));
      }
      out.begins[i] = current->data() + part.offset_bytes;
    }
    return true;
  }

  bool shares_inputs() const override { return false; }  // peers have mappings of their own
  bool is_dead(int peer) const override { return links_->is_dead(peer); }
  std::string describe_peer(int peer) const override { return "pid " + std::to_string(links_->pid(peer)); }
  void leave() noexcept override { links_->close(); }

 private:
  const std::shared_ptr<ShmLinks> links_;
  PoolRef pool_;
};

std::shared_ptr<Mapping> receive_control(int socket, size_t size_bytes, Deadline deadline, const std::string& where) {
  for (;;) {
    LinkMessage message;
    FileDescriptor file;
    switch (receive_message(socket, message, file)) {
      case Received::kMessage:
        if (message.size_bytes != size_bytes) {
          throw CommError(where + "rank 0 sent a control segment of " + std::to_string(message.size_bytes) +
                          " bytes, expected " + std::to_string(size_bytes) + ": run the same bucketwheel on all ranks");
        }
        return Mapping::of_file(file.get(), size_bytes, true);
      case Received::kEnd:
        throw PeerError(where + "rank 0 closed its connection while the communicator was made", {.rank = 0});
      case Received::kNothing:
        break;
    }
    if (has_passed(deadline)) {
      throw CommTimeout(where + "rank 0 sent no control segment in time");
    }
    pollfd readable{socket, POLLIN, 0};
    poll(&readable, 1, 100);
  }
}

void send_control(int socket, int file, size_t size_bytes, int rank, Deadline deadline, const std::string& where) {
  const std::string named = where + "rank " + std::to_string(rank);
  for (;;) {
    switch (send_message(socket, {LinkMessage::Kind::kControl, 0, size_bytes}, file)) {
      case Sent::kSent:
        return;
      case Sent::kEnd:
        throw PeerError(named + " closed its connection while the communicator was made", {.rank = rank});
      case Sent::kFull:
      case Sent::kShort:  // nothing says when there is room again
        break;
    }
    if (has_passed(deadline)) {
      throw CommTimeout(named + " did not get the control segment: the system passes no more file descriptors");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::shared_ptr<Mapping> share_control(const ShmOptions& options, const std::vector<FileDescriptor>& sockets) {
  const size_t size_bytes = Control::size_bytes(options.world);
  const Deadline deadline = earlier(options.until, Clock::now() + options.timeout);
  const std::string where = "[bucketwheel rank " + std::to_string(options.rank) + "/" + std::to_string(options.world) +
                            " comm '" + options.name + "' seq 0] ";
  if (options.rank != 0) {
    return receive_control(sockets[0].get(), size_bytes, deadline, where);
  }
  const FileDescriptor file = make_memfd("bucketwheel-control", size_bytes);
  for (int r = 1; r < options.world; ++r) {
    send_control(sockets[static_cast<size_t>(r)].get(), file.get(), size_bytes, r, deadline, where);
  }
  return Mapping::of_file(file.get(), size_bytes, true);
}

}  // namespace

void expect_shared_memory(int world) {
  const size_t size_bytes = Control::size_bytes(world);
  const FileDescriptor file = make_memfd("bucketwheel-probe", size_bytes);
  const auto mine = Mapping::of_file(file.get(), size_bytes, true);
  const auto theirs = Mapping::of_file(file.get(), size_bytes, false);
  mine->data()[0] = std::byte{1};
  if (theirs->data()[0] != std::byte{1}) {
    throw CommError("two mappings of one memfd do not share memory on this host");
  }
}

CommRef make_shm_comm(const ShmOptions& options) {
  std::vector<FileDescriptor> sockets(options.sockets.begin(), options.sockets.end());
  const auto memory = share_control(options, sockets);
  const Control control(memory->data(), options.world);
  auto links = std::make_shared<ShmLinks>(options.rank, std::move(sockets), options.pids, control.record(options.rank));
  return std::make_shared<HostComm>(HostCommOptions{options.rank, options.name, options.timeout, options.id}, control,
                                    memory, std::make_unique<ShmTransport>(std::move(links)));
}

}  // namespace bucketwheel
