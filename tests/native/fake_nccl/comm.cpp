#include "comm.h"

#include <algorithm>
#include <cstring>

#include "sums.h"

using namespace bucketwheel;

namespace fake_nccl {
namespace {

struct Registry {
  std::atomic<uint64_t> removed{0};
  std::atomic<uint64_t> in_making{0};
  std::mutex mutex;
  uintptr_t last = 0;
  std::map<NcclCommRef, CommPtr> alive;
};
Registry& registry() {
  static auto* const one = new Registry();
  return *one;
}

constexpr const char* kFunctions[] = {"ncclAllGather", "ncclReduceScatter", "ncclBroadcast"};

Notice notice_of(const Operation& operation) {
  return {{static_cast<int64_t>(operation.function), static_cast<int64_t>(operation.type),
           static_cast<int64_t>(operation.count), operation.reduce, operation.root, 0}};
}
std::string text_of(const Notice& notice) {
  return std::string(kFunctions[notice.values[0]]) + "(count " + std::to_string(notice.values[2]) + ", type " +
         std::to_string(notice.values[1]) + ", op " + std::to_string(notice.values[3]) + ", root " +
         std::to_string(notice.values[4]) + ")";
}

// Whether all ranks came with the same call. Where they did not, all of them find the same, and fail.
bool agree(Comm& comm, const Operation& operation) {
  Board& board = *comm.board;
  board.notice(Lane::kDevice, comm.rank, 1) = notice_of(operation);
  if (!board.meet(Lane::kDevice, [&] { return comm.is_aborted.load(); })) {
    return false;
  }
  const Notice& first = board.notice(Lane::kDevice, 0, 0);
  for (int rank = 1; rank < comm.world; ++rank) {
    const Notice& other = board.notice(Lane::kDevice, rank, 0);
    if (std::memcmp(&first, &other, sizeof first) != 0) {
      comm.set_error(kNcclInvalidUsage, "ranks disagree: rank 0 calls " + text_of(first) + ", rank " +
                                            std::to_string(rank) + " calls " + text_of(other));
      return false;
    }
  }
  return true;
}

// The part [begin, begin + count) of the elements of an operation (of a shard, where it has shards).
void write_stage(Comm& comm, const Operation& operation, size_t begin, size_t count) {
  const size_t size = bytes_of(operation.type);
  const auto* const send = static_cast<const std::byte*>(operation.send);
  std::byte* const stage = comm.board->stage(comm.rank, 1);
  switch (operation.function) {
    case Function::kReduceScatter:
      for (size_t shard = 0; shard < static_cast<size_t>(comm.world); ++shard) {
        std::memcpy(stage + shard * count * size, send + (shard * operation.count + begin) * size, count * size);
      }
      return;
    case Function::kBroadcast:
      if (comm.rank == operation.root) {
        std::memcpy(stage, send + begin * size, count * size);
      }
      return;
    case Function::kAllGather:
      std::memcpy(stage, send + begin * size, count * size);
  }
}

void read_stages(Comm& comm, const Operation& operation, size_t begin, size_t count) {
  const size_t size = bytes_of(operation.type);
  auto* const recv = static_cast<std::byte*>(operation.recv);
  const std::byte* from[kMaxWorld] = {};
  for (int rank = 0; rank < comm.world; ++rank) {
    from[rank] = comm.board->stage(rank, 0);
  }
  switch (operation.function) {
    case Function::kAllGather:
      for (size_t rank = 0; rank < static_cast<size_t>(comm.world); ++rank) {
        std::memcpy(recv + (rank * operation.count + begin) * size, from[rank], count * size);
      }
      return;
    case Function::kReduceScatter:
      for (int rank = 0; rank < comm.world; ++rank) {
        from[rank] += static_cast<size_t>(comm.rank) * count * size;
      }
      reduce(operation.type, from, comm.world, operation.reduce, operation.premul.scalar.data(), count,
             recv + begin * size);
      return;
    case Function::kBroadcast:
      std::memcpy(recv + begin * size, from[operation.root], count * size);
  }
}

void run(Comm& comm, const Operation& operation) {
  const auto is_stopped = [&] { return comm.is_aborted.load(); };
  if (operation.hangs) {
    wait_until([] { return false; }, is_stopped);
  }
  if (comm.error != 0 || is_stopped() || !agree(comm, operation)) {
    return;
  }
  const size_t shards = operation.function == Function::kReduceScatter ? static_cast<size_t>(comm.world) : 1;
  const size_t most = kStageBytes / shards / bytes_of(operation.type);
  const bool multiplies_alone = comm.world == 1 && operation.reduce >= kNcclAvg;
  const size_t end =
      multiplies_alone ? reached_by_one_rank(operation.count, bytes_of(operation.type)) : operation.count;
  for (size_t begin = 0; begin < end; begin += most) {
    const size_t count = std::min(most, end - begin);
    write_stage(comm, operation, begin, count);
    if (!comm.board->meet(Lane::kDevice, is_stopped)) {
      return;
    }
    read_stages(comm, operation, begin, count);
  }
}

// The operations of one communicator in one group. They run in the first stream; the others wait for them, and they for
// what is in the others. A captured batch runs at each replay, so what it counts, it also counts down.
struct Batch {
  CommPtr comm;
  std::vector<Operation> operations;
  int others = 0;
  bool is_captured = false;
  uint64_t ticket = 0;
  std::atomic<int> arrived{0};
  std::atomic<int> left{0};
  std::atomic<int> references{0};  // launches that have not run

  void drop() {
    if (!is_captured && --references == 0) {
      delete this;
    }
  }
  void arrive() {
    ++arrived;
    drop();
  }
  void leave() {
    wait_until([&] { return left > 0; }, [&] { return comm->is_aborted.load(); });
    --left;
    drop();
  }
  void work() {
    if (is_captured) {  // follows what was issued when it runs
      ticket = comm->queue->take();
      ++comm->pending;
    }
    const auto is_stopped = [&] { return comm->is_aborted.load(); };
    wait_until([&] { return arrived >= others; }, is_stopped);
    arrived -= others;
    if (wait_until([&] { return comm->queue->is_turn(ticket); }, is_stopped)) {
      const InProgress counted;
      ++comm->running;
      for (const Operation& operation : operations) {
        run(*comm, operation);
      }
      --comm->running;
    }
    comm->queue->finish(ticket);
    --comm->pending;
    left += others;
    drop();
  }
};

// Of a batch whose end nobody tells: a graph's, or one that was launched by half.
void keep(Batch* batch) {
  static auto* const kept = new std::vector<Batch*>();
  static auto* const mutex = new std::mutex();
  std::lock_guard lock(*mutex);
  kept->push_back(batch);
}

int launch_batch(Batch* batch, const std::vector<void*>& streams) {
  batch->others = static_cast<int>(streams.size()) - 1;
  batch->references = 2 * batch->others + 1;
  batch->is_captured = is_capturing(streams.front());
  if (batch->is_captured) {
    keep(batch);
  } else {
    batch->ticket = batch->comm->queue->take();
    ++batch->comm->pending;
  }
  int error = 0;
  // None of these three waits for one that is launched after it.
  for (size_t i = 1; i < streams.size(); ++i) {
    error |= launch(streams[i], [](void* batch) { static_cast<Batch*>(batch)->arrive(); }, batch);
  }
  error |= launch(streams[0], [](void* batch) { static_cast<Batch*>(batch)->work(); }, batch);
  for (size_t i = 1; i < streams.size(); ++i) {
    error |= launch(streams[i], [](void* batch) { static_cast<Batch*>(batch)->leave(); }, batch);
  }
  return error;
}

}  // namespace

NcclCommRef add_comm(CommPtr comm) {
  std::lock_guard lock(registry().mutex);
  const auto handle = reinterpret_cast<NcclCommRef>(++registry().last * 4096);
  registry().alive[handle] = std::move(comm);
  return handle;
}
// A thread finds the one that it asked for last without the lock, as long as none is removed.
CommPtr find_comm(NcclCommRef handle) {
  struct Last {
    NcclCommRef handle = nullptr;
    uint64_t removed = 0;
    std::weak_ptr<Comm> comm;
  };
  thread_local Last last;
  if (handle == nullptr || handle != last.handle || registry().removed != last.removed) {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().alive.find(handle);
    last = {handle, registry().removed, found == registry().alive.end() ? nullptr : found->second};
  }
  return last.comm.lock();
}
uint64_t removed_comms() { return registry().removed; }
void remove_comm(NcclCommRef handle) {
  std::lock_guard lock(registry().mutex);
  registry().alive.erase(handle);
  ++registry().removed;
}

Making::Making() { ++registry().in_making; }
Making::~Making() { --registry().in_making; }

int submit(const std::vector<Issue>& issues) {
  std::vector<CommPtr> comms;
  for (const Issue& issue : issues) {
    if (std::find(comms.begin(), comms.end(), issue.comm) == comms.end()) {
      comms.push_back(issue.comm);
    }
  }
  for (const CommPtr& comm : comms) {
    if (counts_only()) {
      break;
    }
    auto* const batch = new Batch();
    batch->comm = comm;
    batch->operations.reserve(issues.size());
    std::vector<void*> streams;
    for (const Issue& issue : issues) {
      if (issue.comm == comm) {
        batch->operations.push_back(issue.operation);
        if (std::find(streams.begin(), streams.end(), issue.stream) == streams.end()) {
          streams.push_back(issue.stream);
        }
      }
    }
    if (launch_batch(batch, streams) != 0) {
      keep(batch);  // part of it may be in a stream
      comm->set_error(kNcclUnhandledCudaError, "the launch in a stream failed");
      return comm->tell_error();
    }
  }
  return kNcclSuccess;
}

}  // namespace fake_nccl

FAKE_EXPORT uint64_t fake_nccl_live_comms() {
  const uint64_t in_making = fake_nccl::registry().in_making;  // first, so that none is missed on its way
  std::lock_guard lock(fake_nccl::registry().mutex);
  return in_making + fake_nccl::registry().alive.size();
}
