// How sums of squares are added up: the chunks of a segment, and segments into a total.
//
// fold() adds groups of kFoldGroup values, each in ascending order, then the groups' sums in ascending order. So a
// block of threads, with one group a thread, gets the same bits as a single thread.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

inline constexpr int64_t kFoldGroup = 64;

// The sum of one group of `count` values; groups are counted from 0.
BW_HD double fold_group(const double* values, int64_t count, int64_t group) {
  const int64_t end = count - group * kFoldGroup < kFoldGroup ? count : (group + 1) * kFoldGroup;
  double sum = 0.0;
  for (int64_t i = group * kFoldGroup; i < end; ++i) {
    sum += values[i];
  }
  return sum;
}

BW_HD int64_t fold_groups(int64_t count) { return count / kFoldGroup + (count % kFoldGroup != 0 ? 1 : 0); }

BW_HD double fold(const double* values, int64_t count) {
  double total = 0.0;
  for (int64_t group = 0; group < fold_groups(count); ++group) {
    total += fold_group(values, count, group);
  }
  return total;
}

// fold() of values that come one by one.
class Fold {
 public:
  BW_HD void add(double value) {
    group_ += value;
    if (++in_group_ == kFoldGroup) {
      total_ += group_;
      group_ = 0.0;
      in_group_ = 0;
    }
  }
  BW_HD double result() const { return in_group_ == 0 ? total_ : total_ + group_; }

 private:
  double total_ = 0.0;  // of the complete groups
  double group_ = 0.0;
  int64_t in_group_ = 0;
};

}  // namespace bucketwheel
