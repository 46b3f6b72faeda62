// Operation: one coalesced collective as its rank issued it. Checks of the arguments, and the signature by which ranks
// find out that they called different things.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "comm/control.h"

namespace bucketwheel {

enum class Collective : uint8_t { kAllGather, kReduceScatter };
const char* name_of(Collective collective);
const char* name_of(ReduceOp op);

struct Operation {
  Collective collective = Collective::kAllGather;
  ReduceOp reduce = ReduceOp::kSum;
  std::vector<Segment> segments;
  std::shared_ptr<ReduceSink> sink;
  std::vector<const std::byte*> inputs;  // by segment: the shard of an all-gather, the full buffer of a reduce-scatter
  size_t size_bytes = 0;                 // of the full buffers
  uint64_t signature = 0;                // equal on all ranks
  uint64_t seq = 0;

  const View& input_of(size_t segment) const {
    return collective == Collective::kAllGather ? segments[segment].shard : segments[segment].full;
  }
  // What it is, for peers; see text_of().
  void describe(RankRecord& record) const;
};

// "all_gather of 2 tensors, 96 bytes: float32[12], bfloat16[24]": the operation that the record describes.
std::string text_of(const RankRecord& record);

// Checks everything that one rank can check and fills what is derived. ValueError or TypeError names the segment.
// Outputs overlap nothing, except that a shard may be its rank's own part of its full buffer.
std::shared_ptr<Operation> make_operation(Collective collective, std::span<const Segment> segments, ReduceOp reduce,
                                          std::shared_ptr<ReduceSink> sink, int rank, int world);

}  // namespace bucketwheel
