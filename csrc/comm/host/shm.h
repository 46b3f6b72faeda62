// The `shm` backend: the ranks are processes of one host that map each other's memory.
//
// Nothing has a name in the file system: memory is memfds that travel over connected sockets, so nothing is left behind
// however a process ends, and no other user can reach it.
//
// [Note: liveness] A watcher thread, which never needs the GIL, sleeps in poll() on the sockets and, where the system
// has them, on pidfds. When a process ends, however it ends, the kernel closes its sockets: the watcher marks the
// peer dead and rings this rank's doorbell. A rank that leaves in an orderly way says so in its record before it
// closes.
//
// [Note: slabs travel ahead] A rank announces a slab to its peers before anybody can use it; operations name slabs
// by id. A peer may have yet to receive the announcement when an operation names the slab: the operation then waits
// for the doorbell, which its watcher rings. A slab that its owner has freed is announced as gone, and unmapped when no
// operation reads it.
//
// [Note: peers that take no messages] The socket of a peer that does not run (SIGSTOP, a debugger, a frozen cgroup) is
// full after some hundred messages. Nobody waits for it: not the thread that announces, nor the watcher, which has the
// deaths of the others to see, nor close(). What such a peer has yet to hear is in no queue; it is the difference
// between our slabs and those it knows, and the watcher tells it when there is room. So every peer hears of a slab
// before its end, of neither twice, and never of a slab that has come and gone meanwhile. The peer's operations wait for
// the slabs that they need as above, within their own time limits.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/mapping.h"
#include "comm/comm.h"
#include "comm/host/team.h"
#include "pool/upstream.h"

namespace bucketwheel {

struct ShmOptions {
  int rank = 0;
  int world = 1;
  // Connected SOCK_SEQPACKET Unix sockets by rank, our own entry -1, whose other ends are the peers `pids`.
  std::vector<int> sockets;
  std::vector<pid_t> pids;
  std::string name;
  std::chrono::nanoseconds timeout{};  // of an operation, from when the stream reaches it; also of this call
  std::string id{};                    // of Health
  Deadline until{};                    // of this call, if that is earlier
};

// CommError with the reason where this system cannot share as much memory as a communicator of `world` ranks needs.
void expect_shared_memory(int world);

// Called by all ranks; returns when the control segment is mapped here. Takes the sockets over, also when it throws.
CommRef make_shm_comm(const ShmOptions& options);

// One message. Sockets are SOCK_SEQPACKET: a message arrives whole or not at all.
struct LinkMessage {
  enum class Kind : uint32_t { kControl, kSlab, kSlabGone };
  Kind kind;
  uint32_t slab;
  uint64_t size_bytes;
};

// kFull: the peer has yet to read earlier ones, and POLLOUT says when it did; kShort: the system has no memory or no
// passed descriptors left for it now, and nothing says when; kEnd: the peer is gone.
enum class Sent { kSent, kFull, kShort, kEnd };
// Never blocks. `file`: the descriptor to pass, -1: none.
Sent send_message(int socket, const LinkMessage& message, int file);
enum class Received { kMessage, kNothing, kEnd };
// Never blocks. CommError when a passed file descriptor was lost (too many open files), or for a message of another length.
Received receive_message(int socket, LinkMessage& message, FileDescriptor& file);

// The sockets of one rank to its peers. Over them slabs travel, and by them deaths are seen.
class ShmLinks {
 public:
  // `sockets` by rank, our own entry unused. The watcher runs from here on. `own` must outlive this.
  ShmLinks(int rank, std::vector<FileDescriptor> sockets, std::vector<pid_t> pids, RankRecord& own);
  ~ShmLinks();

  bool is_dead(int rank) const { return peers_[static_cast<size_t>(rank)]->is_dead; }
  pid_t pid(int rank) const { return peers_[static_cast<size_t>(rank)]->pid; }
  // A peer's slab, null when its announcement has not arrived. CommError when we could not receive it.
  std::shared_ptr<Mapping> slab(int rank, uint32_t id) const;
  // Tells all peers about a slab of ours; those that take no messages now hear of it when they do.
  void announce(const SlabRef& slab);
  // Stops the watcher and closes the sockets; waits for no peer. Idempotent.
  void close() noexcept;

 private:
  struct Peer {
    FileDescriptor socket;
    FileDescriptor pidfd;
    pid_t pid = 0;
    std::atomic<bool> is_dead{false};
    std::map<uint32_t, std::shared_ptr<Mapping>> slabs;
    std::string broken;  // why slabs can no longer be received
    Sent last_sent = Sent::kSent;
  };
  struct Announced {
    std::weak_ptr<Slab> slab;
    std::vector<bool> is_known;  // by rank: it was told of the slab, and not of its end
  };
  void watch() noexcept;
  void look_at(Peer& peer, bool has_ended) noexcept;
  void take(Peer& peer, const LinkMessage& message, const FileDescriptor& file);
  int list_polled(std::vector<pollfd>& polled, std::vector<Peer*>& owners);
  void tell_peers();
  void tell(size_t rank, uint32_t id, Announced& announced);
  void wake_watcher() noexcept;

  const int rank_;
  RankRecord& own_;
  std::vector<std::unique_ptr<Peer>> peers_;
  mutable std::mutex slabs_mutex_;  // of Peer::slabs and broken
  std::mutex send_mutex_;           // of Peer::last_sent, of the two below, and of sending
  std::map<uint32_t, Announced> announced_;
  bool is_closed_ = false;
  FileDescriptor wake_;
  std::atomic<bool> must_stop_{false};
  std::thread watcher_;
};

}  // namespace bucketwheel
