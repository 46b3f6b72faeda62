// Fused multi-tensor Adam on the CPU: one step over any number of rows, from the formula in adam_math.h.
//
// Results have the same bits for any number of threads, division into rows, alignment and instruction set. A table is
// built once and stepped many times; building one for a single step is cheap too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/adam_math.h"
#include "kernels/adam_variant.h"
#include "kernels/segment_table.h"

namespace bucketwheel {

// ValueError for a row whose random bits have no key; its dtypes and master are the caller's to check. `index` is for
// messages.
void expect_adam_row(const AdamRow& row, int64_t index);

// One step over the rows [first_row, last_row). Arrays are indexed by row, over the whole table.
struct AdamStep {
  std::span<const AdamGroup> groups;  // indexed by AdamRow::group
  std::span<const int64_t> steps;     // the step that each row takes now, counted from 1
  std::span<const uint8_t> used;      // 0: the row is left untouched; empty: all rows are used
  std::span<const double> gscale;     // factor of each row's gradient; one value: for all; empty: 1
  int64_t first_row = 0;
  int64_t last_row = 0;
  bool decoupled = true;  // AdamW; false: weight_decay * p is added to the gradient (L2)
  bool maximize = false;
  bool stochastic = true;       // bfloat16 v is rounded stochastically; m and vmax always to nearest
  bool resync = false;          // AdamWeight::kMaster follows what others have written to the parameter
  uint64_t seed = 0;            // of the random bits: philox.h
  const float* noop = nullptr;  // points to a number that is not 0 when the step starts: nothing changes
};

class AdamTable {
 public:
  static constexpr int64_t kChunkNumel = 8192;  // a multiple of 64: chunks of aligned rows start aligned

  AdamTable() : segments_(kChunkNumel) {}

  // Both check as above. add() returns the row's index.
  int64_t add(const AdamRow& row);
  void set_grad(int64_t row, const void* g, DType g_dtype);

  // ValueError, with nothing changed: sizes that do not match rows(), a group out of range, a used row without a
  // gradient or with a step below 1. Not thread-safe: one call of step() or add() at a time.
  void step(const AdamStep& step);

  int64_t rows() const { return segments_.rows(); }
  int64_t numel() const { return segments_.first_element(rows()); }
  const AdamRow& row(int64_t index) const { return rows_[static_cast<size_t>(index)]; }

 private:
  void validate(const AdamStep& step) const;
  void fill_scalars(const AdamStep& step);

  SegmentTable segments_;
  std::vector<AdamRow> rows_;
  std::vector<AdamScalarsOf<double>> scalars_;  // by row, for the step in progress; kept to save the allocation
};

}  // namespace bucketwheel
