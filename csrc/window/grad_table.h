// GradTable: the facts of each parameter's gradient that outlive a window. The shards hold plain *sums* over the ranks.
//
// A gradient counts as sum * average * factor. The factor is the product of a number that the host knows, here, and on CUDA
// of an entry in device memory (kernels/adam_rows.py). Loops over parameters are here: there may be thousands.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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
class GradTable {
 public:
  // A piece of a parameter in the gradient shard of this rank.
  struct Piece {
    std::byte* data;
    int64_t numel;
    DType dtype;
  };
  GradTable(Device& device, size_t count);
  void set_pieces(int param, std::vector<Piece> pieces) { pieces_[at(param)] = std::move(pieces); }
  // The first parameters take over the facts of `indices` in `old`; what is in the shards counts as edited.
  void carry_over(const GradTable& old, std::span<const int> indices);

  size_t count() const { return pieces_.size(); }
  // How often a sum has changed, or the set of the parameters that have one.
  uint64_t version() const { return version_; }

  // ---- sums in the shards
  // Whether the shards hold a sum of an earlier window that counts. Entered by set_held(); left by forget() and set_held().
  bool has_sum(int param) const { return has_sum_[at(param)] != 0; }
  const std::vector<uint8_t>& sums() const { return has_sum_; }
  // A window has ended: exactly the parameters `held` have a sum.
  void set_held(std::string_view held);
  // Flags: sums that were not made zero on this rank alone, of the parameters `held`.
  std::vector<uint8_t> older(std::string_view held) const;
  void forget(int param);
  void forget_all();
  // Zeroes the numbers of a parameter in the shards. `stream`: of CUDA.
  void zero(int param, Stream* stream);
  // As zero(), by a decision of this rank alone until the next window ends, where all ranks agree; drops its factor.
  void replace_by_zero(int param, Stream* stream);
  // An edit: the sum of squares that was made on arrival does not hold, until the next window.
  void mark_edited(int param);
  void clear_edited() { edited_.assign(count(), 0); }
  // Every bucket has been reduced: sums of squares hold again.
  void mark_reduced();
  std::vector<int> edited() const;  // those that have a sum

  // ---- factors
  double factor(int param) const { return factors_[at(param)]; }
  bool has_factor(int param) const { return factors_[at(param)] != 1.0 || entry(param) == EntryState::kScaled; }
  bool has_factors() const;
  EntryState entry(int param) const { return entries_[at(param)]; }
  bool has_entries(EntryState state) const;
  // From now on an entry that is kOne may have been changed by the replay of a CUDA graph.
  void expect_replays() { may_be_replayed_ = true; }
  bool may_be_replayed() const { return may_be_replayed_; }
  // Sets what is pending, without applying what was.
  void set_factor(int param, double factor);
  void scale(std::span<const int> params, double factor);
  void note_scaled(std::span<const int> params);
  void replace_entries(EntryState from, EntryState to);
  void reset_factors() { factors_.assign(count(), 1.0); }
  void reset_entries() { entries_.assign(count(), EntryState::kOne); }
  // Doubles; empty if all are 1.
  std::vector<double> known() const;
  void set_known(std::span<const double> factors);
  const std::vector<double>& factors() const { return factors_; }

 private:
  static size_t at(int param) { return static_cast<size_t>(param); }

  Device& device_;
  uint64_t version_ = 0;
  std::vector<std::vector<Piece>> pieces_;
  std::vector<uint8_t> has_sum_;
  std::vector<uint8_t> zeroed_;  // by replace_by_zero()
  std::vector<uint8_t> edited_;
  std::vector<double> factors_;
  std::vector<EntryState> entries_;
  bool may_be_replayed_ = false;
};

}  // namespace bucketwheel
