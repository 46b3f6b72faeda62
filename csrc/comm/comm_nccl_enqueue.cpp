// An operation as calls of NCCL: NcclComm::enqueue().
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "base/error.h"
#include "comm/comm_nccl.h"
#include "kernels/float16.h"

namespace bucketwheel {
namespace {

std::byte* own_part(const Segment& segment, int rank) {
  return static_cast<std::byte*>(segment.full.data) + static_cast<size_t>(rank) * segment.shard.size_bytes();
}

// `factor` as one element of `dtype`.
void store_scalar(void* to, DType dtype, double factor) {
  const float single = static_cast<float>(factor);
  const uint16_t half = dtype == DType::kBFloat16 ? round_to_bf16(single) : round_to_fp16(single);
  const void* const from = dtype == DType::kFloat64   ? static_cast<const void*>(&factor)
                           : dtype == DType::kFloat32 ? static_cast<const void*>(&single)
                                                      : &half;
  std::memcpy(to, from, size_of(dtype));
}

}  // namespace

void NcclComm::enqueue(const Operation& op, Stream& stream) {
  const NcclApi& nccl = api();
  void* const native = native_stream(stream, name_of(op.collective));
  NcclCommRef const comm = session_->comm();
  if (comm == nullptr) {
    throw CommError("the communicator has ended");
  }
  // A factor that NCCL multiplies by is in the tensors' dtype: one operator for each of these.
  std::map<DType, int> operators;
  if (op.collective == Collective::kReduceScatter && op.reduction.op == ReduceOp::kPreMul) {
    for (const Segment& segment : op.segments) {
      if (!operators.contains(segment.full.dtype)) {
        operators[segment.full.dtype] = make_operator(op.reduction.factor, segment.full.dtype);
      }
    }
  }
  const auto operator_for = [&](DType dtype) {
    switch (op.reduction.op) {
      case ReduceOp::kSum:
        return kNcclSum;
      case ReduceOp::kAvg:
        return kNcclAvg;
      case ReduceOp::kPreMul:
        return operators.at(dtype);
    }
    return kNcclSum;
  };
  const auto count = std::ranges::count_if(op.segments, [](const Segment& s) { return s.full.numel != 0; });
  const auto deadline = peers_->timeout_from_now();
  NcclCall failed = NcclCall::group_end;
  int result = kNcclSuccess;
  const bool is_group = count > 1;
  if (is_group) {
    BW_NCCL_TRY(nccl, group_start);
  }
  for (const Segment& segment : op.segments) {
    if (segment.full.numel != 0 && (result == kNcclSuccess || result == kNcclInProgress)) {
      result = call(op, segment, operator_for(segment.full.dtype), native, &failed);
    }
  }
  if (is_group) {  // always closed, or the thread's next call of any communicator would be part of it
    const int ended = BW_NCCL_CALL(nccl, group_end);
    if (result == kNcclSuccess || result == kNcclInProgress) {
      failed = NcclCall::group_end;
      result = ended;
    }
  }
  result = session_->settle(result, deadline);
  if (result == kNcclInProgress) {
    throw CommError(std::string(symbol_of(failed)) + " was still in progress after the communicator's timeout");
  }
  const std::string why = result == kNcclSuccess ? "" : nccl_error(nccl, failed, result).what();
  for (const auto& [dtype, made] : operators) {
    if (session_->comm() == comm) {  // else it has ended meanwhile, and they with it
      (void)BW_NCCL_CALL(nccl, red_op_destroy, made, comm);
    }
  }
  if (result != kNcclSuccess) {
    throw NcclError(result, why);
  }
  if (op.sink) {
    for (size_t i = 0; i < op.segments.size(); ++i) {
      const View& shard = op.segments[i].shard;
      const void* const sum = own_part(op.segments[i], rank());
      if (shard.numel != 0) {
        op.sink->enqueue(i, {&sum, 1}, shard.dtype, shard.numel, stream);
      }
    }
  }
}

int NcclComm::make_operator(double factor, DType dtype) const {
  alignas(8) unsigned char scalar[8] = {};
  store_scalar(scalar, dtype, factor);
  int made = kNcclSum;
  BW_NCCL_TRY(api(), red_op_create_pre_mul_sum, &made, scalar, nccl_type(dtype), kNcclScalarHostImmediate,
              session_->comm());
  return made;
}

int NcclComm::call(const Operation& op, const Segment& segment, int reduction, void* native, NcclCall* called) const {
  const NcclApi& nccl = api();
  const View& shard = segment.shard;
  const auto numel = static_cast<size_t>(shard.numel);
  switch (op.collective) {
    case Collective::kAllGather:
      *called = NcclCall::all_gather;
      return BW_NCCL_CALL(nccl, all_gather, shard.data, segment.full.data, nccl_move_count(shard.dtype, numel),
                          nccl_move_type(shard.dtype), session_->comm(), native);
    case Collective::kReduceScatter:
      *called = NcclCall::reduce_scatter;
      // A sink takes the sums from where the rank's own part of the input was.
      return BW_NCCL_CALL(nccl, reduce_scatter, segment.full.data, op.sink ? own_part(segment, rank()) : shard.data,
                          numel, nccl_type(shard.dtype), reduction, session_->comm(), native);
    case Collective::kBroadcast:
      *called = NcclCall::broadcast;
      return BW_NCCL_CALL(nccl, broadcast, shard.data, shard.data, nccl_move_count(shard.dtype, numel),
                          nccl_move_type(shard.dtype), op.root, session_->comm(), native);
  }
  return kNcclInvalidArgument;
}

}  // namespace bucketwheel
