#include "comm/operation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

std::string at(size_t pair) { return "tensor pair " + std::to_string(pair) + ": "; }

void check_reduction(const Operation& op) {
  const Reduction& reduction = op.reduction;
  BW_EXPECTS(!op.sink || reduction.op == ReduceOp::kSum,
             std::string("op '") + name_of(reduction.op) + "' cannot have a sink: use 'sum'");
  BW_EXPECTS(std::isfinite(reduction.factor), "the factor of op 'premul' is " + std::to_string(reduction.factor));
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const DType dtype = op.pairs[i].full.dtype;
    BW_EXPECTS(is_float(dtype) || reduction.op == ReduceOp::kSum, at(i) + "op '" + name_of(reduction.op) + "' of " +
                                                                      name_of(dtype) +
                                                                      " is not supported: use 'sum' for integers");
    BW_EXPECTS(!op.sink || op.sink->takes(dtype), at(i) + name_of(op.collective) + " of " + name_of(dtype) +
                                                      " into a sink that does not take it: a float64 shard " +
                                                      "takes float64, any other shard float32, bfloat16 and float16");
  }
}

struct Range {
  const std::byte* begin;
  const std::byte* end;
  size_t pair;
};

Range range_of(const View& view, size_t pair) {
  const auto* begin = static_cast<const std::byte*>(view.data);
  return {begin, begin + view.size_bytes(), pair};
}

[[noreturn]] void throw_overlap(const char* what, const Range& a, const Range& b) {
  throw ValueError(at(a.pair) + what + (a.pair == b.pair ? "" : " of tensor pair " + std::to_string(b.pair)) +
                   "; a shard may overlap only its rank's part of its full buffer");
}

void check_overlap(const Operation& op, int rank) {
  const bool gathers = op.collective == Collective::kAllGather;
  std::vector<Range> outputs;
  outputs.reserve(op.pairs.size());
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const View& output = gathers ? op.pairs[i].full : op.pairs[i].shard;
    if (output.numel != 0 && output.data != nullptr) {
      outputs.push_back(range_of(output, i));
    }
  }
  std::sort(outputs.begin(), outputs.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t k = 1; k < outputs.size(); ++k) {
    if (outputs[k].begin < outputs[k - 1].end) {
      throw_overlap("the output overlaps the output", outputs[k], outputs[k - 1]);
    }
  }
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const Range input = range_of(op.input_of(i), i);
    if (input.begin == input.end) {
      continue;
    }
    const auto* own_part = static_cast<const std::byte*>(op.pairs[i].full.data) +
                           static_cast<size_t>(rank) * op.pairs[i].shard.size_bytes();
    // The first output that ends behind the input's begin; outputs are disjoint, so their ends are sorted too.
    auto output = std::upper_bound(outputs.begin(), outputs.end(), input.begin,
                                   [](const std::byte* begin, const Range& range) { return begin < range.end; });
    for (; output != outputs.end() && output->begin < input.end; ++output) {
      if (output->pair != i || op.pairs[i].shard.data != own_part) {
        throw_overlap("the input overlaps the output", input, *output);
      }
    }
  }
}

// FNV-1a over 64-bit words, then a final mix (of MurmurHash3): small numbers must not cancel.
class Hash {
 public:
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3ull;
    state_ ^= state_ >> 29;
  }
  uint64_t value() const {
    uint64_t x = state_;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325ull;
};

}  // namespace

void ReduceSink::enqueue(size_t, std::span<const void* const>, DType, int64_t, Stream&) {
  throw TypeError("the sink takes sums in host memory, but the communicator is on a CUDA device");
}

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "premul"};
  return kNames[static_cast<size_t>(op)];
}

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "broadcast"};
  return kNames[static_cast<size_t>(collective)];
}

Description Operation::description() const {
  Description out{};
  out.collective = static_cast<uint8_t>(collective);
  out.reduce = static_cast<uint8_t>(reduction.op);
  out.factor = reduction.factor;
  out.root = root;
  out.unit = unit;
  out.tensors = pairs.size();
  out.size_bytes = size_bytes;
  for (size_t i = 0; i < std::min(pairs.size(), Description::kShown); ++i) {
    out.shown[i] = {static_cast<uint8_t>(pairs[i].full.dtype), pairs[i].full.numel};
  }
  return out;
}

std::string text_of(const Description& description) {
  const auto collective = static_cast<Collective>(description.collective);
  std::string out = name_of(collective);
  if (collective == Collective::kReduceScatter) {
    const auto op = static_cast<ReduceOp>(description.reduce);
    out += std::string("(") + name_of(op) + (op == ReduceOp::kPreMul ? " " + std::to_string(description.factor) : "") +
           ")";
  }
  if (collective == Collective::kBroadcast) {
    out += " from rank " + std::to_string(description.root);
  }
  if (description.unit != 0) {
    out += description.unit == kEndOfWindow ? " at the end of a window of gradients"
                                            : " for unit " + std::to_string(description.unit - 1);
  }
  if (description.tensors == 0) {
    return out;
  }
  out += " of " + std::to_string(description.tensors) + (description.tensors == 1 ? " tensor, " : " tensors, ") +
         std::to_string(description.size_bytes) + " bytes:";
  for (size_t i = 0; i < std::min<size_t>(description.tensors, Description::kShown); ++i) {
    const Description::Shown& shown = description.shown[i];
    out += std::string(i ? ", " : " ") + name_of(static_cast<DType>(shown.dtype)) + "[" + std::to_string(shown.numel) +
           "]";
  }
  return description.tensors > Description::kShown ? out + ", ..." : out;
}

std::string mismatch_text(std::span<const std::string> calls) {
  std::string text = "ranks called different operations:";
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    text += "\n  rank " + std::to_string(rank) + ": " + calls[rank];
  }
  return text;
}

std::shared_ptr<Operation> make_operation(const OperationKind& kind, std::vector<TensorPair> listed,
                                          std::shared_ptr<ReduceSink> sink, int rank, int world) {
  auto op = std::make_shared<Operation>();
  static_cast<OperationKind&>(*op) = kind;
  op->pairs = std::move(listed);
  const std::vector<TensorPair>& pairs = op->pairs;
  op->sink = std::move(sink);
  if (kind.collective == Collective::kReduceScatter || op->sink) {
    check_reduction(*op);
  }
  BW_EXPECTS(kind.root >= 0 && kind.root < world,
             "broadcast from rank " + std::to_string(kind.root) + " in a world of " + std::to_string(world));
  Hash hash;
  hash.add(static_cast<uint64_t>(kind.collective) << 8 | static_cast<uint64_t>(kind.reduction.op));
  hash.add(std::bit_cast<uint64_t>(kind.reduction.factor));
  hash.add(static_cast<uint64_t>(kind.root));
  hash.add(kind.unit);
  hash.add(pairs.size());
  op->inputs.reserve(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    hash.add(static_cast<uint64_t>(pairs[i].full.dtype));
    hash.add(static_cast<uint64_t>(pairs[i].full.numel));
    op->size_bytes += pairs[i].full.size_bytes();
    op->inputs.push_back(static_cast<const std::byte*>(op->input_of(i).data));
  }
  if (kind.collective != Collective::kBroadcast) {
    check_overlap(*op, rank);
  }
  op->signature = hash.value();
  return op;
}

}  // namespace bucketwheel
