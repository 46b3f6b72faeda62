// GradTable: the facts of each parameter's gradient that outlive a window. The shards hold plain *sums* over the ranks.
//
// A gradient counts as sum * average * factor. The factor is the product of a number that the host knows, here, and on CUDA
// of an entry in device memory (kernels/adam_rows.py). Loops over parameters are here: there may be thousands.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "device/device.h"

namespace bucketwheel {

// What is known of a factor's entry in device memory.
enum class EntryState : uint8_t {
  kOne,     // it is 1, as far as the host knows
  kScaled,  // it counts: something was multiplied into it since it was 1
  kStale,   // its factor was reset: it becomes 1 before anybody reads it
};

// Flags are bytes, one for each parameter. Not thread-safe.
struct GradTable {
  // A piece of a parameter in the gradient shard of this rank.
  struct Piece {
    void* data;
    size_t size_bytes;
  };
  GradTable(Device& device, size_t count);

  // The first parameters take over the facts of `indices` in `old`; what is in the shards counts as edited.
  void carry_over(const GradTable& old, std::span<const int> indices);
  bool has_sum(int param) const { return sums[at(param)] != 0; }
  // A window has ended: exactly the parameters `held` have a sum.
  void set_held(std::span<const uint8_t> held);
  // Flags: sums that were not made zero on this rank alone, of the parameters `held`.
  std::vector<uint8_t> older(std::string_view held) const;
  void forget(int param);
  void forget_all();
  // Zeroes the numbers of a parameter in the shards. `stream`: of CUDA.
  void zero(int param, Stream* stream);
  // An edit: the sum of squares that was made on arrival does not hold, until the next window.
  void mark_edited(int param);
  // Every bucket has been reduced: sums of squares hold again.
  void mark_reduced();
  bool has_factor(int param) const { return factors[at(param)] != 1.0 || entries[at(param)] == EntryState::kScaled; }
  // Sets what is pending, without applying what was.
  void set_factor(int param, double factor);

  static size_t at(int param) { return static_cast<size_t>(param); }

  Device& device;
  std::vector<std::vector<Piece>> pieces;
  std::vector<uint8_t> sums;    // the shards hold a sum of an earlier window that counts: from set_held() to forget()
  std::vector<uint8_t> zeroed;  // the sum is zeros by a decision of this rank alone, until the next window ends
  std::vector<uint8_t> edited;
  std::vector<double> factors;
  std::vector<EntryState> entries;
  bool may_be_replayed = false;  // an entry that is kOne may have been changed by the replay of a CUDA graph
  uint64_t version = 0;          // how often a sum has changed, or the set of the parameters that have one
};

}  // namespace bucketwheel
