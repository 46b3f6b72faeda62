#include "comm/outputs.h"

#include <algorithm>
#include <cstring>

#include "base/align.h"
#include "kernels/cpu_kernels.h"
#include "kernels/reduce.h"

namespace bucketwheel {
namespace {

// [Note: outputs past the cache] An operation that outgrows the cache stores its copies and plain sums past it. The
// processor then need not read the lines that are written, which are a third of the bytes that a copy moves. The outputs
// of smaller operations stay in the cache until somebody reads them. Sums that are scaled in float are stored as ever.
// Measured with bench_comm.py, 2 ranks, an AMD EPYC, commit f49b275: from 8 MiB on this is quicker; at 4 MiB sums are
// slower, and so are pairs shorter than 64 KiB in operations of any size.
constexpr size_t kOutgrowsCacheBytes = size_t{8} << 20;
constexpr size_t kLeastPairBytes = size_t{64} << 10;
// Sums on their way past the cache: they and what is added stay in the first level of it.
constexpr size_t kSumsBytes = 4096;

bool goes_past_cache(const Operation& op, size_t pair) {
  return op.size_bytes >= kOutgrowsCacheBytes && op.pairs[pair].shard.size_bytes() >= kLeastPairBytes;
}

// What a reduction does to a sum before it is rounded to its dtype.
template <class Float>
void scale(const Reduction& reduction, int world, Float* sum, int64_t numel) {
  switch (reduction.op) {
    case ReduceOp::kSum:
      return;
    case ReduceOp::kAvg:
      std::transform(sum, sum + numel, sum, [divisor = static_cast<Float>(world)](Float x) { return x / divisor; });
      return;
    case ReduceOp::kPreMul:
      std::transform(sum, sum + numel, sum,
                     [factor = static_cast<Float>(reduction.factor)](Float x) { return x * factor; });
      return;
  }
}

// Sums in the dtype of what is added.
void store_sums_as_they_are(const Operation& op, bool goes_past, std::byte* out, DType dtype, int64_t numel,
                            std::span<const std::byte*> sources) {
  const int world = static_cast<int>(sources.size());
  alignas(kCacheLineBytes) std::byte sums[kSumsBytes];
  const int64_t step = goes_past ? static_cast<int64_t>(kSumsBytes / size_of(dtype)) : numel;
  for (int64_t done = 0; done < numel; done += step) {
    const int64_t count = std::min(step, numel - done);
    const size_t bytes = static_cast<size_t>(count) * size_of(dtype);
    std::byte* const to = goes_past ? sums : out;
    reduce_sum(reinterpret_cast<const void* const*>(sources.data()), world, dtype, count, to);
    if (dtype == DType::kFloat64) {
      scale(op.reduction, world, reinterpret_cast<double*>(to), count);
    }
    if (goes_past) {
      cpu_kernels().copy_past_cache(out, sums, bytes);
    }
    out += bytes;
    for (const std::byte*& source : sources) {
      source += bytes;
    }
  }
}

}  // namespace

void put_gathered(const Operation& op, size_t pair, void* to, const void* from, size_t bytes) {
  if (goes_past_cache(op, pair)) {
    cpu_kernels().copy_past_cache(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void copy_own_part(const Operation& op, int rank) {
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const TensorPair& pair = op.pairs[i];
    const size_t bytes = pair.shard.size_bytes();
    std::byte* to = static_cast<std::byte*>(pair.full.data) + static_cast<size_t>(rank) * bytes;
    if (bytes != 0 && to != pair.shard.data) {
      put_gathered(op, i, to, pair.shard.data, bytes);
    }
  }
}

void store_sums(const Operation& op, size_t pair, int64_t begin, int64_t numel, std::span<const std::byte*> sources) {
  const int world = static_cast<int>(sources.size());
  const View& shard = op.pairs[pair].shard;
  const size_t element_bytes = size_of(shard.dtype);
  std::byte* const out = static_cast<std::byte*>(shard.data) + static_cast<size_t>(begin) * element_bytes;
  const bool is_double = shard.dtype == DType::kFloat64;
  if (!op.sink && (op.reduction.op == ReduceOp::kSum || is_double)) {  // integers always come here
    store_sums_as_they_are(op, goes_past_cache(op, pair), out, shard.dtype, numel, sources);
    return;
  }
  alignas(kCacheLineBytes) std::byte room[kSinkBlockNumel * sizeof(double)];
  for (int64_t done = 0; done < numel; done += kSinkBlockNumel) {
    const int64_t count = std::min(kSinkBlockNumel, numel - done);
    const auto* const from = reinterpret_cast<const void* const*>(sources.data());
    if (is_double) {
      reduce_sum(from, world, shard.dtype, count, room);
    } else {
      auto* const sum = reinterpret_cast<float*>(room);
      reduce_sum_fp32(from, world, shard.dtype, count, sum);
      scale(op.reduction, world, sum, count);
    }
    if (op.sink) {
      op.sink->consume(pair, begin + done, room, count);
    } else {
      store_fp32(out + static_cast<size_t>(done) * element_bytes, shard.dtype, reinterpret_cast<const float*>(room),
                 count);
    }
    for (const std::byte*& source : sources) {
      source += static_cast<size_t>(count) * element_bytes;
    }
  }
}

void feed_gathered(const Operation& op) {
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const View& full = op.pairs[i].full;
    const auto* from = static_cast<const std::byte*>(full.data);
    alignas(kCacheLineBytes) float block[kSinkBlockNumel];
    for (int64_t begin = 0; begin < full.numel; begin += kSinkBlockNumel) {
      const int64_t count = std::min(kSinkBlockNumel, full.numel - begin);
      const void* source = from + static_cast<size_t>(begin) * size_of(full.dtype);
      if (full.dtype != DType::kFloat64) {
        reduce_sum_fp32(&source, 1, full.dtype, count, block);
        source = block;
      }
      op.sink->consume(i, begin, source, count);
    }
  }
}

}  // namespace bucketwheel
