#include "comm/nccl/launch.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "base/error.h"
#include "device/device_cuda.h"
#include "kernels/float16.h"

namespace bucketwheel {
namespace {

std::byte* own_part(const TensorPair& pair, int rank) {
  return static_cast<std::byte*>(pair.full.data) + static_cast<size_t>(rank) * pair.shard.size_bytes();
}

// [Note: sums of one rank] A factor is multiplied in a kernel that NCCL has for one rank alone, and that leaves elements
// out (seen with 2.28.9: oneRankReduce in its src/device/onerank.cu). Each of b = min(32, bytes / 16 KiB rounded up)
// blocks takes n / b elements rounded down, then up to a pack of 16 bytes: the last up to b - 1 elements may be nobody's.
// So "avg" is "sum" there, and the rest after a factor is a call of its own, of one block.
// How many of `numel` elements, from the first on, one such call reaches if it is given no more.
size_t reach_of_one_rank(size_t numel, size_t size) {
  constexpr size_t kMostBlocks = 32;
  constexpr size_t kBlockBytes = size_t{16} << 10;
  const size_t pack = 16 / size;
  for (;; --numel) {
    const size_t blocks = std::clamp((numel * size + kBlockBytes - 1) / kBlockBytes, size_t{1}, kMostBlocks);
    if ((numel / blocks + pack - 1) / pack * pack * blocks >= numel) {
      return numel;
    }
  }
}

bool multiplies_alone(const NcclSession& session, const Operation& op) {
  return session.world() == 1 && op.reduces() && op.reduction.op == ReduceOp::kPreMul;
}

// The reductions of one operation. A factor that NCCL multiplies by is in the tensors' dtype: one operator for each.
class Operators {
 public:
  Operators(const NcclSession& session, const Operation& op) : session_(session), reduction_(op.reduction) {
    if (op.collective == Collective::kReduceScatter && reduction_.op == ReduceOp::kPreMul) {
      for (const TensorPair& pair : op.pairs) {
        if (!made_.contains(pair.full.dtype)) {
          made_[pair.full.dtype] = make(pair.full.dtype);
        }
      }
    }
  }
  ~Operators() {  // NOLINT(bugprone-exception-escape): only a call that the library lacks throws, and it has this one
    for (const auto& [dtype, made] : made_) {
      if (NcclCommRef const comm = session_.comm()) {  // else it has ended meanwhile, and they with it
        (void)BW_NCCL_CALL(session_.api(), red_op_destroy, made, comm);
      }
    }
  }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;

  int of(DType dtype) const {
    switch (reduction_.op) {
      case ReduceOp::kSum:
        return kNcclSum;
      case ReduceOp::kAvg:
        return session_.world() == 1 ? kNcclSum : kNcclAvg;  // [Note: sums of one rank]
      case ReduceOp::kPreMul:
        break;
    }
    const auto found = made_.find(dtype);
    return found == made_.end() ? kNcclSum : found->second;
  }

 private:
  int make(DType dtype) const {
    const auto single = static_cast<float>(reduction_.factor);
    const uint16_t half = dtype == DType::kBFloat16 ? round_to_bf16(single) : round_to_fp16(single);
    const void* const from = dtype == DType::kFloat64   ? static_cast<const void*>(&reduction_.factor)
                             : dtype == DType::kFloat32 ? static_cast<const void*>(&single)
                                                        : &half;
    alignas(8) unsigned char scalar[8] = {};
    std::memcpy(scalar, from, size_of(dtype));
    int made = kNcclSum;
    BW_NCCL_TRY(session_.api(), red_op_create_pre_mul_sum, &made, scalar, nccl_type(dtype), kNcclScalarHostImmediate,
                session_.comm());
    return made;
  }

  const NcclSession& session_;
  const Reduction reduction_;
  std::map<DType, int> made_;
};

int call(const NcclSession& session, const Operation& op, const TensorPair& pair, int reduction, void* native,
         NcclCall* called) {
  const NcclApi& nccl = session.api();
  const View& shard = pair.shard;
  const auto numel = static_cast<size_t>(shard.numel);
  switch (op.collective) {
    case Collective::kAllGather:
      *called = NcclCall::all_gather;
      return BW_NCCL_CALL(nccl, all_gather, shard.data, pair.full.data, nccl_move_count(shard.dtype, numel),
                          nccl_move_type(shard.dtype), session.comm(), native);
    case Collective::kReduceScatter: {
      *called = NcclCall::reduce_scatter;
      const auto* const from = static_cast<const std::byte*>(pair.full.data);
      // A sink takes the sums from where the rank's own part of the input was.
      std::byte* const to = op.sink ? own_part(pair, session.rank()) : static_cast<std::byte*>(shard.data);
      const auto reduce = [&](size_t begin, size_t count) {
        const size_t skipped = begin * size_of(shard.dtype);
        return BW_NCCL_CALL(nccl, reduce_scatter, from + skipped, to + skipped, count, nccl_type(shard.dtype),
                            reduction, session.comm(), native);
      };
      const size_t reach = multiplies_alone(session, op) ? reach_of_one_rank(numel, size_of(shard.dtype)) : numel;
      const int result = reduce(0, reach);
      return reach == numel || result != kNcclSuccess ? result : reduce(reach, numel - reach);
    }
    case Collective::kBroadcast:
      *called = NcclCall::broadcast;
      return BW_NCCL_CALL(nccl, broadcast, shard.data, shard.data, nccl_move_count(shard.dtype, numel),
                          nccl_move_type(shard.dtype), op.root, session.comm(), native);
  }
  return kNcclInvalidArgument;
}

}  // namespace

void launch_nccl(const NcclSession& session, const Operation& op, Stream& stream) {
  const NcclApi& nccl = session.api();
  void* const native = native_stream(stream, name_of(op.collective));
  if (session.comm() == nullptr) {
    throw CommError("the communicator has ended");
  }
  const Operators operators(session, op);
  const auto has_elements = [](const TensorPair& pair) { return pair.full.numel != 0; };
  const bool is_group = multiplies_alone(session, op) || std::ranges::count_if(op.pairs, has_elements) > 1;
  NcclCall called = NcclCall::group_start;
  if (is_group) {
    BW_NCCL_TRY(nccl, group_start);
  }
  int result = kNcclSuccess;
  for (const TensorPair& pair : op.pairs) {
    if (has_elements(pair) && result == kNcclSuccess) {
      result = call(session, op, pair, operators.of(pair.full.dtype), native, &called);
    }
  }
  if (is_group) {  // always closed, or the thread's next call of any communicator would be part of it
    const int ended = BW_NCCL_CALL(nccl, group_end);
    if (result == kNcclSuccess) {
      called = NcclCall::group_end;
      result = ended;
    }
  }
  if (result != kNcclSuccess) {
    throw nccl_error(nccl, called, result);
  }
  for (size_t i = 0; op.sink && i < op.pairs.size(); ++i) {
    const TensorPair& pair = op.pairs[i];
    const bool is_sum = op.collective == Collective::kReduceScatter;
    const void* const from = is_sum ? own_part(pair, session.rank()) : pair.full.data;
    const View& taken = is_sum ? pair.shard : pair.full;
    if (taken.numel != 0) {
      op.sink->enqueue(i, {&from, 1}, taken.dtype, taken.numel, stream);
    }
  }
}

}  // namespace bucketwheel
