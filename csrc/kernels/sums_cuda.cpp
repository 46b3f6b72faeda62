#include "kernels/sums_cuda.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

size_t partial_bytes(int64_t chunks) { return static_cast<size_t>(std::max<int64_t>(1, chunks)) * sizeof(double); }

}  // namespace

SumsqCudaTable::SumsqCudaTable(CudaDevice& device)
    : device_(device), device_rows_(device), device_chunks_(device), partial_(device) {}

void SumsqCudaTable::run(std::span<const NormRow> rows, double* sums, double* total, Stream& stream) {
  std::vector<NormCudaRow> cuda_rows;
  SegmentTable segments(kNormChunkNumel);
  for (const NormRow& row : rows) {
    segments.add(row.numel);
    cuda_rows.push_back({row.data, 0, row.numel, row.dtype, 1});
  }
  if (rows.empty()) {
    return;
  }
  std::vector<int64_t> first_chunk(segments.first_chunks().begin(), segments.first_chunks().end());
  const auto row_count = static_cast<int64_t>(rows.size());
  first_chunk.insert(first_chunk.end(), {0, row_count});  // of the total, whose chunks are the rows
  CudaGuard guard(device_.id().index);
  last_use_.in(stream, "sums of squares", [&](void* native, bool is_captured) {
    was_captured_ = was_captured_ || is_captured;
    upload_tables(std::move(cuda_rows), first_chunk, segments.chunks(), stream);
    SumsqLaunch launch;
    launch.rows = device_rows_.as<const NormCudaRow>();
    launch.first_chunk = device_chunks_.as<const int64_t>();
    launch.row_count = row_count;
    launch.chunks = segments.chunks();
    launch.partial = partial_.as<double>();
    launch.max_blocks = device_.fill_blocks(kCudaBlockThreads);
    if (launch.chunks > 0) {
      BW_CUDA_TRY(launch_sumsq, launch, native);
    }
    const FoldLaunch fold{launch.rows, launch.first_chunk, row_count, launch.partial, sums};
    BW_CUDA_TRY(launch_fold, fold, native);
    if (total != nullptr) {
      const FoldLaunch fold_rows{launch.rows, launch.first_chunk + row_count + 1, 1, sums, total};
      BW_CUDA_TRY(launch_fold, fold_rows, native);
    }
  });
}

void SumsqCudaTable::upload_tables(std::vector<NormCudaRow> rows, std::span<const int64_t> first_chunk, int64_t chunks,
                                   Stream& stream) {
  if (!was_captured_ && rows == rows_) {
    return;
  }
  rows_.clear();
  partial_.reserve(partial_bytes(chunks), was_captured_);
  device_rows_.upload<NormCudaRow>(rows, stream, was_captured_);
  device_chunks_.upload<int64_t>(first_chunk, stream, was_captured_);
  rows_ = std::move(rows);  // noted after it was uploaded
}

ShardAccumulatorCuda::ShardAccumulatorCuda(CudaDevice& device, void* shard, DType dtype, int64_t numel,
                                           const std::vector<Segment>& segments, double* sums)
    : device_(device),
      shard_(shard),
      dtype_(dtype),
      numel_(numel),
      sums_(sums),
      spans_(kNormChunkNumel),
      device_rows_(device),
      device_chunks_(device),
      partial_(device) {
  expect_shard_dtype(dtype);
  expect_shard_segments(segments, numel);
  const auto add_span = [this](int64_t begin, int64_t end, bool is_summed) {
    spans_.add(end - begin);
    rows_.push_back({nullptr, begin, end - begin, DType::kFloat32, static_cast<uint8_t>(is_summed ? 1 : 0)});
  };
  int64_t last = 0;
  for (const Segment& segment : segments) {
    if (last < segment.begin) {
      add_span(last, segment.begin, false);
    }
    span_of_.push_back(spans_.rows());
    add_span(segment.begin, segment.end, true);
    last = segment.end;
  }
  if (last < numel) {
    add_span(last, numel, false);
  }
  if (!rows_.empty()) {
    device_rows_.reserve(rows_.size() * sizeof(NormCudaRow));
    device_chunks_.reserve(spans_.first_chunks().size_bytes());
    partial_.reserve(partial_bytes(spans_.chunks()));
  }
}

void ShardAccumulatorCuda::run(std::span<const void* const> sources, DType dtype, int64_t numel, Stream& stream) {
  BW_EXPECTS(numel == numel_,
             "sums of " + std::to_string(numel) + " elements for a shard of " + std::to_string(numel_));
  BW_EXPECTS(!sources.empty() && sources.size() <= static_cast<size_t>(AccumulateLaunch::kMaxWorld),
             std::to_string(sources.size()) + " ranks: 1 to " + std::to_string(AccumulateLaunch::kMaxWorld) +
                 " are supported on one device");
  if (spans_.rows() == 0) {
    return;
  }
  CudaGuard guard(device_.id().index);
  void* const native = native_stream(stream, "reduce-scatter");
  if (!is_uploaded_) {
    device_rows_.upload<NormCudaRow>(rows_, stream);
    device_chunks_.upload<int64_t>(spans_.first_chunks(), stream);
    is_uploaded_ = !is_capturing(stream);
  }
  AccumulateLaunch launch;
  launch.shard = shard_;
  launch.shard_dtype = dtype_;
  std::copy(sources.begin(), sources.end(), launch.sources);
  launch.world = static_cast<int>(sources.size());
  launch.dtype = dtype;
  launch.add = add_;
  launch.sums.rows = device_rows_.as<const NormCudaRow>();
  launch.sums.first_chunk = device_chunks_.as<const int64_t>();
  launch.sums.row_count = spans_.rows();
  launch.sums.chunks = spans_.chunks();
  launch.sums.partial = partial_.as<double>();
  launch.sums.max_blocks = device_.fill_blocks(kCudaBlockThreads);
  if (launch.sums.chunks > 0) {
    BW_CUDA_TRY(launch_accumulate, launch, native);
  }
  const FoldLaunch fold{launch.sums.rows, launch.sums.first_chunk, launch.sums.row_count, launch.sums.partial, sums_};
  BW_CUDA_TRY(launch_fold, fold, native);
}

}  // namespace bucketwheel
