// Communicator: coalesced all-gather and reduce-scatter over a group of ranks, and agreement between their hosts.
//
// Every rank calls the same operations in the same order. Validation is complete before anything is enqueued: a throw
// from all_gather(), reduce_scatter() or broadcast() means nothing was enqueued and the communicator is as before. A
// failure while running (dead peer, deadline, mismatch) fails the communicator: the handle and every later call throw
// it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "comm/handle.h"
#include "device/stream.h"
#include "pool/pool.h"

namespace bucketwheel {

// A contiguous range of elements in memory of the communicator's device.
struct View {
  void* data = nullptr;
  int64_t numel = 0;
  DType dtype = DType::kFloat32;
  size_t size_bytes() const { return static_cast<size_t>(numel) * size_of(dtype); }
};

// A tensor pair of a coalesced call: `full` holds world x shard elements, rank r's part at r * shard.numel.
// The shard may be the rank's own part of `full` (in place); any other overlap is an error.
struct TensorPair {
  View full;
  View shard;
};

enum class Collective : uint8_t { kAllGather, kReduceScatter, kBroadcast };
enum class ReduceOp : uint8_t { kSum, kAvg, kPreMul };
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1.0;  // kPreMul: of every input, the same on all ranks
};

// Takes a reduced shard block by block instead of a plain store. Called on the communicator's stream, blocks of one
// operation in ascending order, never concurrently. `sum` holds the sums of elements [begin, begin + numel) of the
// shard of tensor pair `pair`: float, or double where the buckets are float64; of an all-gather, those elements of its
// full buffer, as they were gathered.
// A block is a multiple of kSinkBlockNumel elements, except the last of a shard: so few that what is done to one fits
// beside the loads of the next. bench_comm.py --quick, "64 MiB reduce-scatter, pool, to a sink", an AMD EPYC, commit
// a23a3a3: 5.8 and 6.4 ms, with four times as many 8.4 and 7.3.
inline constexpr int64_t kSinkBlockNumel = 1024;
class ReduceSink {
 public:
  virtual ~ReduceSink() = default;
  // Asked before an operation is issued: whether sums of buckets of `dtype` can be taken.
  virtual bool takes(DType dtype) const = 0;
  virtual void consume(size_t pair, int64_t begin, const void* sum, int64_t numel) = 0;
  // CUDA: enqueues, in `stream`, the taking of the whole shard of tensor pair `pair`: the sum of sources[r] in rank
  // order, each of `numel` elements of `dtype` in device memory (one source, of an all-gather). TypeError from a sink
  // that is for host memory.
  virtual void enqueue(size_t pair, std::span<const void* const> sources, DType dtype, int64_t numel, Stream& stream);
};

struct IssueOptions {
  StreamRef stream;             // null: the communicator's own
  StreamRef caller;             // CUDA: the operation starts after what is in this stream now
  std::vector<EventRef> after;  // the operation starts after these
  bool timing = false;
  std::vector<Handle::Keepalive> keepalive;
};

struct Operation;
struct OperationKind;
class Peers;

class Comm {
 public:
  virtual ~Comm() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual const std::string& name() const = 0;
  virtual const char* backend() const = 0;
  // Whether Handle::is_ordered() tells that the peers have issued the operation. If not, a stream that waits for one
  // may wait there for a peer that has not.
  virtual bool sees_peers() const { return true; }
  virtual DeviceId device() const { return {}; }
  // Memory that peers reach without a staging copy. Leases of it may be passed to the collectives in whole or in part.
  virtual const PoolRef& pool() const = 0;
  // The stream that operations run in; made at the first one on CUDA, null before.
  virtual StreamRef stream() const = 0;

  // A sink takes the gathered full buffers as well, which are floats of 32 or 16 bits then.
  HandleRef all_gather(std::vector<TensorPair> pairs, IssueOptions options, std::shared_ptr<ReduceSink> sink = nullptr);
  // With a sink, `shard.data` may be null (nothing is stored, the sink takes the sums; kSum only).
  HandleRef reduce_scatter(std::vector<TensorPair> pairs, Reduction reduction, std::shared_ptr<ReduceSink> sink,
                           IssueOptions options);
  // `tensor` becomes what it is on rank `root`.
  HandleRef broadcast(const View& tensor, int root, IssueOptions options);
  // make_operation() for this rank and world. ValueError for what this backend does not sum, too.
  std::shared_ptr<Operation> checked(const OperationKind& kind, std::vector<TensorPair> pairs,
                                     std::shared_ptr<ReduceSink> sink) const;
  // Enqueues an operation that checked() has made. Sets its seq: an Operation is issued once.
  virtual HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options) = 0;
  // Throws the error that the communicator has failed with, or ClosedError.
  virtual void expect_usable() const = 0;
  virtual Peers& peers() = 0;

  // Host-to-host agreement, beside the stream: every rank posts one payload (at most kMaxPayloadBytes; lengths may
  // differ) per round, in program order; collect() blocks until all have posted and returns the payloads by rank.
  // Never touches the device. A round starts with post() and ends with collect(); a rank may post a round's payload
  // only when it has collected the round before (ValueError). Fails like a collective after the communicator's
  // timeout; CommTimeout at an earlier `deadline` leaves the round open, and so does what `poll` throws, which is
  // called every 100 ms of waiting.
  static constexpr size_t kMaxPayloadBytes = size_t{1} << 20;
  virtual void post(std::span<const std::byte> payload);
  virtual std::vector<std::vector<std::byte>> collect(Deadline deadline = {}, const std::function<void()>& poll = {});

  // Fails the communicator on every rank: the next wait throws with `reason`, here CommError, on the others PeerError.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Waits for the operations in flight, then says goodbye to the peers; later calls throw ClosedError. Idempotent.
  // Operations that still run at `deadline` fail with ClosedError.
  virtual void close(Deadline deadline = {}) = 0;
};
using CommRef = std::shared_ptr<Comm>;

// A checked operation on fixed buffers, to be started any number of times.
class Request {
 public:
  // `keepalive` owns the buffers, as long as the request or an operation that it has started lives.
  Request(CommRef comm, std::shared_ptr<const Operation> op, std::vector<Handle::Keepalive> keepalive)
      : comm_(std::move(comm)), op_(std::move(op)), keepalive_(std::move(keepalive)) {}
  // Adds its keepalive to that of `options`.
  HandleRef start(IssueOptions options) const;
  DeviceId device() const { return comm_->device(); }

 private:
  const CommRef comm_;
  const std::shared_ptr<const Operation> op_;
  const std::vector<Handle::Keepalive> keepalive_;
};

}  // namespace bucketwheel
