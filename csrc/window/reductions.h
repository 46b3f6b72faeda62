// Reductions: the reduce-scatters of one rank that are issued, and the memory that they hold.
//
// [Note: soft bound] Before a bucket takes memory, fewer than `limit` reduce-scatters should hold some. A peer that runs
// another graph may launch its part of them only when it closes its window, and before that it may wait for this rank (a
// loss all-reduce before step()). So no wait is without a limit, and a rank that is ahead takes more memory instead:
//
// - On the CPU an arrival waits for kRoomWait at most. If that is in vain it takes more memory, and no arrival waits again
//   in this window. Memory goes on when its operation has completed and not before, so that taking it never waits.
// - On CUDA no arrival waits. The memory of a reduce-scatter that all ranks have issued goes to the next bucket at once, which
//   the stream orders behind it. One that a peer has yet to issue keeps its memory: the stream would wait for that peer.
// - On CUDA between hosts (not Comm::sees_peers()) a rank does not see which operations the others have issued. When a window
//   closes they agree on whether all of them had launched every bucket before. If one had not, then in the next few windows
//   no memory goes on to another bucket before the window ends, but for registered memory. (In the first such window memory
//   goes on, and a stream may wait for a peer: if your ranks run different graphs, set max_inflight_buckets high.)
//
// Buckets that fill count beside these: gradients that have come must lie somewhere. docs/memory.md has what that makes
// at most.
//
// [Note: reducing with replicas] With HSDP a bucket is reduced in three operations:
//   1. reduce-scatter over the shard group: the *partial sum* of this rank's shard, in fp32 (fp64 of fp64), into a buffer
//      of its own;
//   2. reduce-scatter over the R replicas, in place: each sums an R-th of the shard;
//   3. all-gather over the replicas, in place. Its sink is the gradient shard, which takes the whole sum and its norm.
// Every element is summed by one rank, in rank order, and the replicas receive its bits, so replicas stay bitwise equal
// whatever order NCCL adds in. Adding up gathered partial sums on every rank would save an operation, but each rank would
// receive R - 1 of them instead of 2 (R - 1) / R: as much for two replicas, more for every other number.
// Partial sums travel in fp32 although buckets may have 16 bits: gradients are rounded, sums are not.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/comm.h"
#include "comm/peers/tie.h"
#include "window/grad_sink.h"
#include "window/places.h"

namespace bucketwheel {

// Runs a function that may block: without the GIL, where the caller holds it.
using Aside = std::function<void(const std::function<void()>&)>;

// The ranks over which gradients are summed.
struct Reducers {
  CommRef shard;
  CommRef replicate;          // of HSDP; null without. The next four go with it
  CommRef replicate_gathers;  // of all-gathers among the replicas
  std::shared_ptr<Tie> tie;   // of the two groups
  bool defers = false;       // an operation is issued when all ranks have issued the one before: issuing waits for them
  bool takes_turns = false;  // NCCL may start the kernels of the two groups in another order than that of the calls
};

// Not thread-safe.
class Reductions {
 public:
  Reductions(Reducers reducers, Places& places, int limit, bool is_registered, Aside aside);

  // Memory for the partial sums of HSDP. `shards`: by bucket, the sink that its shard is fed to, and its elements.
  struct Shard {
    std::shared_ptr<GradSink> sink;
    int64_t numel;
    DType dtype;  // of the bucket
  };
  void prepare_sums(std::vector<Shard> shards, PoolPlan plan, const StreamRef& stream);

  // Before a bucket takes memory: [Note: soft bound]. `wanted`: its place; -1: on the side.
  void make_room(int wanted);
  // Issues the sum of `full`, which lies in `memory`, to the sink of `bucket`.
  void issue(int bucket, Turn memory, const View& full, IssueOptions options);
  // All ranks launch what is left of the window now.
  void begin_close() { is_closing_ = true; }
  // Waits for all of them. CUDA: `stream` waits, and this thread until all ranks have issued them.
  void wait(const StreamRef& stream);
  // `is_complete`: all ranks had launched every bucket before they closed the window.
  void end_window(bool is_complete);
  // The next bucket belongs to another CUDA graph, or to none: it waits for no operation of those before.
  void begin_capture();
  // Operations that were captured never run.
  void forget_captured();
  void release(const StreamRef& stream);

  size_t partial_bytes() const { return sums_ == nullptr ? 0 : sums_->planned_bytes() + sums_->side_bytes(); }

 private:
  struct Partial {
    View full;  // padded to a multiple of the replicas
    std::shared_ptr<ReduceSink> sink;
    std::shared_ptr<void> row_sums;  // CUDA: device memory that the sink writes to
  };
  struct Running {
    int bucket;
    std::vector<HandleRef> steps;  // those that are issued
    Turn memory;                   // until it is given on
    Turn partial;
    std::shared_ptr<Partial> sums;
    StreamRef caller;  // CUDA: behind it the operations begin
  };

  bool is_on_cpu() const { return reducers_.shard->device().kind == DeviceId::Kind::kCpu; }
  size_t steps_needed() const { return reducers_.replicate == nullptr ? 1 : 3; }
  HandleRef retire(int keep, int wanted);
  void take_partial(Running& running, std::vector<EventRef>* after);
  void settle_partial(Running& one);
  void advance(size_t until);
  void issue_next(Running& running);
  std::shared_ptr<Partial> partial_in(std::byte* data, int bucket) const;
  template <class Body>
  void failing_as_one(Body&& body);

  Reducers reducers_;
  Places& places_;
  const int limit_;
  const bool is_registered_;  // a bucket is reduced from its place and from nowhere else: window.h
  const Aside aside_;
  std::vector<Shard> shards_;
  std::unique_ptr<Places> sums_;
  std::vector<std::shared_ptr<Partial>> partials_;  // of the places of sums_
  // Issued, and not yet waited for or done; in the order of the buckets.
  std::deque<Running> running_;
  HandleRef last_;           // the last operation of the window. Until the window has waited for it
  bool waits_ = true;        // CPU: until an arrival of the window has waited in vain
  bool is_closing_ = false;  // until the end of the window
  int uneven_windows_ = 0;   // between hosts: in how many more windows memory stays where it is
};

}  // namespace bucketwheel
