// Window: one rank's gradients on their way from autograd into buckets and shards. Native on the CPU and on CUDA alike.
//
// plan/schedule.h decides which gradient goes where and which bucket is reduced when; grad_table.h has what outlives a
// window; this carries out. The hooks of the parameters, and Python for the end of a window, are bindings/window_py.h.
//
// [Note: a gradient's way] A parameter's gradient is in one state, by the first of these that holds:
//   deferred   from the end of no_sync() until the next gradient or the close; the tensor is in the binding
//   void       in the schedule: it was in a bucket and was dropped or replaced since, until the close; a replacement is in
//              late memory
//   in bucket  Schedule::has_stored(): from arrive() until the close
//   in shard   GradTable::has_sum(): from a close until forget(), by a window that opens without a placeholder in p.grad
//   absent     else
//
// [Note: packed in its stream] On CUDA an arriving gradient is *held*: its bucket keeps a reference, and nothing is
// launched. When the bucket is launched, one kernel for each stream in which gradients arrived, enqueued in that stream, packs
// them, casts to the dtype of the bucket and zeroes absent parts; the communicator's stream waits for one event of each; the
// references are dropped. torch's caching allocator gives dropped memory to later work of the stream that it was allocated
// in, or that it was recorded in, which is behind the kernel there, and nowhere else. A kernel in any other stream would read
// memory that is used again. A reference never outlives its backward: pack_held() runs at its end, for memory that is
// written again in the next one (static outputs of CUDA graphs).
// A view that keeps more than twice its bytes alive, and a gradient above kMostHeldBytes, is packed at once.
//
// [Note: places of buckets] A bucket has a place, by a plan for gradients that come in the order of the buckets, from its
// first pack on. The place is not for it while another bucket uses some of these bytes, nor while one has still to be
// launched from them: such a bucket is *too early*. A bucket that finds no place, and late memory, is on the *side*.
//
// Buckets that are ready together are operations of their own. Which are ready together differs from rank to rank, and NCCL
// chooses algorithm and channels by the sum of what is in a group, so ranks would have to have the same groups.
//
// In registered memory a bucket is reduced from its place and from nowhere else: NCCL reads the input of a reduce-scatter
// where it lies on the other ranks, so that must be the same place on all of them. Ranks may differ in the order in which
// gradients arrive. They never differ in this: a window launches every bucket once, in index order, and its late rounds after
// all of these. So a bucket that was packed on the side is copied into its place when it is launched, and there bytes go on
// to the next bucket whether peers have read them or not: the stream waits.
//
// [Note: window gate] One thread at a time is inside. A thread that holds the GIL never blocks on the gate: it gives the GIL
// up first. So the holder may wait for the GIL, or for peers. The GIL is given up around issues, waits and large copies, and
// never for each gradient.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "base/fork.h"
#include "comm/comm.h"
#include "kernels/pack.h"
#include "plan/schedule.h"
#include "window/grad_table.h"
#include "window/reductions.h"

namespace bucketwheel {

struct BucketPart {
  int param;
  int64_t begin;        // elements [begin, begin + numel) of the bucket
  int64_t param_begin;  // hold those of the parameter from here on
  int64_t numel;
};

// A gradient: dense, in the order of the parameter's place in flat memory.
struct Gradient {
  const std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  StreamRef stream;             // CUDA: in which it was written
  std::shared_ptr<void> owner;  // CUDA: set where it may be held
};

struct WindowOptions {
  bool overlap = true;
  int max_inflight = 2;
  bool is_static = false;
  bool is_registered = false;
};

struct BucketSpec {
  int64_t numel;
  DType dtype;
  std::shared_ptr<GradSink> sink;
  int64_t shard_numel;
  std::vector<BucketPart> parts;
};

class Window {
 public:
  static constexpr int64_t kMostHeldBytes = int64_t{16} << 20;

  Window(Reducers reducers, PoolRef side_pool, std::vector<BucketSpec> buckets, std::shared_ptr<GradTable> table,
         PoolPlan plan, PoolPlan sums_plan, const WindowOptions& options, const StreamRef& stream, Aside aside);

  std::recursive_mutex gate;  // held in all calls below: [Note: window gate]

  Schedule& schedule() { return schedule_; }
  GradTable& table() { return *table_; }
  const Places& places() const { return places_; }
  const Reductions& reductions() const { return reductions_; }
  DeviceId device() const { return comm_->device(); }
  bool is_on_cpu() const { return device().kind == DeviceId::Kind::kCpu; }
  bool is_open() const { return is_open_; }
  bool is_foreign() const { return process_.is_foreign(); }

  // Prepares the shards for new sums: drops the sums that p.grad no longer stands for. `found`: flags of what p.grad has a
  // placeholder of, or a gradient to add. Factors that are pending for sums that stay have been applied. `stream`: CUDA, of
  // what is enqueued; null on the CPU.
  void open(std::string_view found, const StreamRef& stream, bool is_captured);
  // A gradient, in an open window: added to what the window has of the parameter, or in its place. `launch`: buckets that
  // are full go out.
  // False, and nothing is stored: it breaks the promise of a static graph.
  bool arrive(int param, const Gradient& gradient, bool add, bool launch);
  // Packs what is held.
  void pack_held();
  // These parameters get no more gradients in this window. Launches the buckets that are complete then.
  void complete(std::span<const int> params, const StreamRef& stream) {
    launch_all(schedule_.complete(params), stream);
  }
  // Drops from late memory what p.grad no longer stands for (`held`: flags), and launches what is left of the first
  // round, if this rank has gradients.
  void flush(std::string_view held, const StreamRef& stream);
  // The ranks have agreed. Launches what is left of the window, on all ranks the same, and waits for all of it. Whether
  // there was a late round.
  bool close(const WindowVerdict& agreed, bool with_late, const StreamRef& stream);
  // All gradients are dropped.
  void discard();
  // The window was captured in a CUDA graph that will never run.
  void forget_captured();
  // Gives all memory back, unreduced.
  void release(const StreamRef& stream);

  std::function<void(int bucket, bool late, int64_t offset)> observer;  // of launches, for tests

  size_t held_bytes() const { return held_bytes_; }  // of gradients that are kept by references
  size_t held_peak_bytes() const { return held_peak_bytes_; }

 private:
  struct Item {
    const BucketPart* part;
    bool add;
    Gradient gradient;
    size_t held_bytes() const { return static_cast<size_t>(part->numel) * size_of(gradient.dtype); }
  };
  enum class Phase : uint8_t {
    kEmpty,     // at first; of the first round from open(), of the late round from its launch
    kFilling,   // from its first gradient
    kLaunched,  // the first round only: from launch()
  };
  // The first round of a bucket, or its late round.
  struct Round {
    Phase phase = Phase::kEmpty;
    Turn memory;                     // from the first pack to the launch, or until dropped
    std::vector<Item> held;          // until packed
    std::vector<StreamRef> streams;  // CUDA: in which the memory was entered, zeroed or written
  };
  struct Bucket {
    BucketSpec spec;
    bool accumulates = false;  // this window adds to what the shard holds; set anew whenever one opens
    Round rounds[2];
    size_t bytes() const { return static_cast<size_t>(spec.numel) * size_of(spec.dtype); }
  };
  struct Place {  // of a part of a parameter
    int bucket;
    const BucketPart* part;
  };

  const BucketPart& part_of(int param, int bucket) const;
  void store(const StoreAction& action, const Gradient& gradient);
  void enter(Bucket& bucket, bool late, bool to_launch, const StreamRef& stream);
  void pack(Bucket& bucket, bool late, bool to_launch, std::span<const int> absent);
  void write(Round& round, const StreamRef& stream, std::span<const CopyItem> items, bool reads);
  CopyItem item_of(const Bucket& bucket, const Round& round, const Item& item) const;
  CopyItem zeros_of(const Bucket& bucket, const Round& round, const BucketPart& part) const;
  void launch(const LaunchAction& action, const StreamRef& stream);
  void launch_all(const std::vector<LaunchAction>& actions, const StreamRef& stream);
  void bring_in(Bucket& bucket, Round& round);
  void drop_held(Round& round);
  void drop_memory(Round& round);

  const MadeIn process_;
  const CommRef comm_;
  const WindowOptions options_;
  const Aside aside_;
  std::vector<Bucket> buckets_;
  std::shared_ptr<GradTable> table_;
  std::vector<std::vector<Place>> places_of_;  // by parameter, by bucket ascending
  Schedule schedule_;
  Places places_;
  Reductions reductions_;
  bool is_open_ = false;
  bool is_captured_ = false;  // the window is part of a CUDA graph; set by open()
  int launched_ = 0;          // how many buckets of the window are, late rounds aside
  // CUDA: the stream in which the shards were prepared for the sums of the window, and an event there.
  StreamRef prepared_in_;
  EventRef prepared_;
  size_t held_bytes_ = 0, held_peak_bytes_ = 0;
};

}  // namespace bucketwheel
