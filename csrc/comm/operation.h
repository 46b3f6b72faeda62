// Operation: one coalesced collective as its rank issued it. Checks of the arguments, and the signature by which ranks
// find out that they called different things.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"

namespace bucketwheel {

const char* name_of(Collective collective);
const char* name_of(ReduceOp op);

inline constexpr uint32_t kEndOfWindow = uint32_t{1} << 31;  // a unit's number: of the gather at the end of a window

// What is done, without the tensors.
struct OperationKind {
  Collective collective = Collective::kAllGather;
  Reduction reduction;  // of a reduce-scatter
  int root = 0;         // of a broadcast
  uint32_t unit = 0;    // which of several alike operations it is, if the caller says so: from 1
};

// What an operation is, for messages: with its first tensors. Plain data, which ranks of one host read of each other.
struct Description {
  uint8_t collective;
  uint8_t reduce;
  int32_t root;
  uint32_t unit;
  double factor;
  uint64_t tensors;
  uint64_t size_bytes;
  static constexpr size_t kShown = 6;
  struct Shown {
    uint8_t dtype;
    int64_t numel;
  } shown[kShown];
};

struct Operation : OperationKind {
  std::vector<TensorPair> pairs;  // of a broadcast: one, whose full buffer and shard are the tensor
  std::shared_ptr<ReduceSink> sink;
  // By pair: the shard of an all-gather, the full buffer of a reduce-scatter, the tensor of a broadcast.
  std::vector<const std::byte*> inputs;
  std::shared_ptr<void> owner;  // of the inputs, where somebody may read them after its end
  size_t size_bytes = 0;        // of the full buffers
  uint64_t signature = 0;       // equal on all ranks
  uint64_t seq = 0;

  bool reduces() const { return collective == Collective::kReduceScatter; }
  bool has_input(int rank) const { return collective != Collective::kBroadcast || rank == root; }
  const View& input_of(size_t pair) const { return reduces() ? pairs[pair].full : pairs[pair].shard; }
  // Where the output of what is gathered, or broadcast, holds the input of `rank`.
  std::byte* place_of(int rank, size_t pair) const {
    const auto part = collective == Collective::kBroadcast ? size_t{0} : static_cast<size_t>(rank);
    return static_cast<std::byte*>(pairs[pair].full.data) + part * pairs[pair].shard.size_bytes();
  }
  Description description() const;
};

// "all_gather of 2 tensors, 96 bytes: float32[12], bfloat16[24]".
std::string text_of(const Description& description);
// "ranks called different operations:" and what each called, by rank.
std::string mismatch_text(std::span<const std::string> calls);

// Checks everything that one rank can check and fills what is derived. ValueError or TypeError names the pair.
// Outputs overlap nothing, except that a shard may be its rank's own part of its full buffer.
std::shared_ptr<Operation> make_operation(const OperationKind& kind, std::vector<TensorPair> listed,
                                          std::shared_ptr<ReduceSink> sink, int rank, int world);

}  // namespace bucketwheel
