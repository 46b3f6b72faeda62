// Sums of squares on CUDA: of lists of tensors, and of gradient shards as they are filled. The host side of
// norm_cuda.h.
//
// Results stay on the device, as doubles; nothing blocks the host. Lists allocate device memory at their first use and
// when they grow, shards when they are made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/cuda_buffer.h"
#include "device/last_use.h"
#include "kernels/norm.h"
#include "kernels/norm_cuda.h"
#include "kernels/segment_table.h"

namespace bucketwheel {

// The sum of squares of each row of a list. One stream at a time uses the tables.
class SumsqCudaTable {
 public:
  explicit SumsqCudaTable(CudaDevice& device);
  // sums[r] = the sum of squares of row r, bitwise that of sumsq(); total (if not null) = all of them folded as
  // chunks are. No rows: nothing is written.
  void run(std::span<const NormRow> rows, double* sums, double* total, Stream& stream);

 private:
  void upload_tables(std::vector<NormCudaRow> rows, std::span<const int64_t> first_chunk, int64_t chunks,
                     Stream& stream);

  CudaDevice& device_;
  std::vector<NormCudaRow> rows_;  // the content of device_rows_
  CudaBuffer device_rows_;
  CudaBuffer device_chunks_;
  CudaBuffer partial_;
  bool was_captured_ = false;  // replays change the device's tables unseen, so their content is unknown
  LastUse last_use_;
};

// ShardAccumulator (norm.h) on CUDA: sums a rank's part over the ranks and stores it, in one pass. All its work is in
// one stream, the communicator's.
class ShardAccumulatorCuda {
 public:
  using Segment = ShardAccumulator::Segment;
  // The most *spans* that a shard may have: its segments and the padding between them.
  static int64_t max_spans(size_t segments) { return 2 * static_cast<int64_t>(segments) + 1; }
  // `shard` holds `numel` elements of `dtype`, `sums` max_spans() doubles. Errors as ShardAccumulator's, and
  // DeviceError when the device has no memory for the tables. All memory is allocated here and none in run(), which is
  // called under the lock of a communicator: emptying caches for more memory may wait for the operations that this
  // lock holds up.
  ShardAccumulatorCuda(CudaDevice& device, void* shard, DType dtype, int64_t numel,
                       const std::vector<Segment>& segments, double* sums);

  // `add`: the next run() adds to the shard; else it overwrites it.
  void start(bool add) { add_ = add; }
  // shard (+)= the sum of sources[r], each of `numel` elements of `dtype`, in rank order; sums[span_of(i)] = the sum of
  // squares of what segment i holds then. ValueError for another numel or more than AccumulateLaunch::kMaxWorld ranks;
  // `dtype` is one that shard_takes().
  void run(std::span<const void* const> sources, DType dtype, int64_t numel, Stream& stream);
  int64_t span_of(size_t segment) const { return span_of_[segment]; }
  DType dtype() const { return dtype_; }
  CudaDevice& device() const { return device_; }

 private:
  CudaDevice& device_;
  void* const shard_;
  const DType dtype_;
  const int64_t numel_;
  double* const sums_;
  bool add_ = false;
  SegmentTable spans_;  // segments and the padding between them, in order
  std::vector<NormCudaRow> rows_;
  std::vector<int64_t> span_of_;  // by segment
  bool is_uploaded_ = false;      // other than by a graph, which may never be replayed
  CudaBuffer device_rows_;
  CudaBuffer device_chunks_;
  CudaBuffer partial_;
};

}  // namespace bucketwheel
