#include "comm/host/shm.h"

#include <fcntl.h>
#include <poll.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/host/host_comm.h"
#include "comm/host/shm_links.h"

namespace bucketwheel {
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
    if (op.segments.size() > RankRecord::kMaxParts) {
      return false;
    }
    for (size_t i = 0; i < op.segments.size(); ++i) {
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
    out.begins.assign(op.segments.size(), nullptr);
    out.mappings.clear();  // of a look before
    uint32_t mapped_slab = kNoSlab;
    const Mapping* current = nullptr;
    for (size_t i = 0; i < op.segments.size(); ++i) {
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

void expect_options(const ShmOptions& options) {
  const auto world = static_cast<size_t>(options.world);
  BW_EXPECTS(options.world >= 1 && options.rank >= 0 && options.rank < options.world &&
                 options.sockets.size() == world && options.pids.size() == world,
             "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " with " +
                 std::to_string(options.sockets.size()) + " sockets and " + std::to_string(options.pids.size()) +
                 " pids");
}

std::shared_ptr<Mapping> receive_control(int socket, size_t size_bytes, Deadline deadline, const std::string& where) {
  for (;;) {
    LinkMessage message;
    FileDescriptor file;
    switch (receive_message(socket, message, file)) {
      case Received::kMessage:
        if (message.size_bytes != size_bytes) {
          throw CommError(where + "rank 0 sent a control segment of " + std::to_string(message.size_bytes) +
                          " bytes, expected " + std::to_string(size_bytes) + ": do all ranks run the same version?");
        }
        return Mapping::of_file(file.get(), size_bytes, true);
      case Received::kEnd:
        throw PeerError(where + "rank 0 hung up while the communicator was being made", {.rank = 0});
      case Received::kNothing:
        break;
    }
    if (has_passed(deadline)) {
      throw CommTimeout(where + "rank 0 sent no control segment");
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
        throw PeerError(named + " hung up while the communicator was being made", {.rank = rank});
      case Sent::kFull:
      case Sent::kShort:  // nothing says when there is room again
        break;
    }
    if (has_passed(deadline)) {
      throw CommTimeout(named + " could not be sent the control segment: the system passes no more file descriptors");
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
    throw CommError("a memfd that is mapped twice is not one memory here");
  }
}

CommRef make_shm_comm(const ShmOptions& options) {
  std::vector<FileDescriptor> sockets(options.sockets.begin(), options.sockets.end());
  expect_options(options);
  const auto memory = share_control(options, sockets);
  const Control control(memory->data(), options.world);
  auto links = std::make_shared<ShmLinks>(options.rank, std::move(sockets), options.pids, control.record(options.rank));
  return std::make_shared<HostComm>(HostCommOptions{options.rank, options.name, options.timeout, options.id}, control,
                                    memory, std::make_unique<ShmTransport>(std::move(links)));
}

}  // namespace bucketwheel
