#include "kernels/adam_table_cuda.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "kernels/adam.h"
#include "kernels/philox.h"

namespace bucketwheel {
namespace {

// The first element from which on all arrays are aligned: AdamCudaRow::head.
uint8_t head_of(const AdamRow& row) {
  constexpr uintptr_t kAlignBytes = 16;
  const size_t p_bytes = size_of(row.p_dtype);
  const size_t state_bytes = size_of(row.state_dtype);
  const size_t master_bytes = row.weight == AdamWeight::kMaster ? sizeof(float) : sizeof(uint16_t);
  const bool is_random = row.state_dtype == DType::kBFloat16;  // v may be rounded stochastically
  for (uintptr_t head = 0; head < 8; ++head) {
    const auto is_aligned = [head](const void* array, size_t element_bytes) {
      return (reinterpret_cast<uintptr_t>(array) + head * element_bytes) % kAlignBytes == 0;  // null is
    };
    const bool starts_block = !is_random || (row.param_begin + static_cast<int64_t>(head)) % kRandomBlockNumel == 0;
    if (starts_block && is_aligned(row.p, p_bytes) && is_aligned(row.g, size_of(row.g_dtype)) &&
        is_aligned(row.m, state_bytes) && is_aligned(row.v, state_bytes) &&
        (row.vmax == nullptr || is_aligned(row.vmax, state_bytes)) &&
        (row.master == nullptr || is_aligned(row.master, master_bytes))) {
      return static_cast<uint8_t>(head);
    }
  }
  return AdamCudaRow::kUnaligned;
}

}  // namespace

AdamCudaTable::AdamCudaTable(CudaDevice& device)
    : device_(device),
      segments_(kAdamCudaChunkNumel),
      device_rows_(device),
      device_chunks_(device),
      device_used_(device),
      device_scalars_(device) {}

int64_t AdamCudaTable::add(const AdamRow& row, uint32_t place) {
  expect_adam_row(row, rows());
  segments_.add(row.numel);
  rows_.push_back({row, place, head_of(row)});
  are_rows_new_ = are_chunks_new_ = true;
  return rows() - 1;
}

void AdamCudaTable::set_grad(int64_t row, const void* g, DType g_dtype) {
  AdamCudaRow& own = rows_[static_cast<size_t>(row)];
  if (own.g == g && own.g_dtype == g_dtype) {
    return;
  }
  own.g = g;
  own.g_dtype = g_dtype;
  own.head = head_of(own);
  are_rows_new_ = true;
}

void AdamCudaTable::clear() {
  segments_ = SegmentTable(kAdamCudaChunkNumel);
  rows_.clear();
  are_rows_new_ = are_chunks_new_ = true;
}

void AdamCudaTable::validate(const AdamCudaStep& step) const {
  BW_EXPECTS(step.used.empty() || static_cast<int64_t>(step.used.size()) == step.param_count,
             "used has " + std::to_string(step.used.size()) + " entries for " + std::to_string(step.param_count) +
                 " parameters");
  BW_EXPECTS(
      step.lr.empty() || step.lr.size() == step.groups.size(),
      "lr has " + std::to_string(step.lr.size()) + " entries for " + std::to_string(step.groups.size()) + " groups");
  for (int64_t r = 0; r < rows(); ++r) {
    const AdamCudaRow& row = rows_[static_cast<size_t>(r)];
    BW_EXPECTS(static_cast<int64_t>(row.place) < step.param_count, "row " + std::to_string(r) + " is of parameter " +
                                                                       std::to_string(row.place) + " of " +
                                                                       std::to_string(step.param_count));
    BW_EXPECTS(row.group >= 0 && static_cast<size_t>(row.group) < step.groups.size(),
               "row " + std::to_string(r) + " is of group " + std::to_string(row.group) + " of " +
                   std::to_string(step.groups.size()));
    const bool is_used = step.used.empty() || step.used[row.place] != 0;
    BW_EXPECTS(!is_used || row.g != nullptr || row.numel == 0, "row " + std::to_string(r) + " has no gradient");
  }
}

void AdamCudaTable::upload_tables(const AdamCudaStep& step, Stream& stream, bool is_captured) {
  was_captured_ = was_captured_ || is_captured;
  if (was_captured_) {
    are_rows_new_ = are_chunks_new_ = true;
    uploaded_rows_.clear();
    is_used_known_ = false;
  }
  // Noted after the upload: if a call fails, nothing counts as uploaded.
  if (are_rows_new_ && rows_ != uploaded_rows_) {  // gradients often come back to the same memory
    uploaded_rows_.clear();
    device_scalars_.reserve(rows_.size() * sizeof(AdamCudaScalars), was_captured_);
    device_rows_.upload<AdamCudaRow>(rows_, stream, was_captured_);
    uploaded_rows_ = rows_;
  }
  are_rows_new_ = false;
  if (are_chunks_new_) {
    device_chunks_.upload<int64_t>(segments_.first_chunks(), stream, was_captured_);
    are_chunks_new_ = false;
  }
  if (!is_used_known_ || !std::ranges::equal(used_, step.used)) {
    is_used_known_ = false;
    device_used_.upload<uint8_t>(step.used, stream, was_captured_);
    used_.assign(step.used.begin(), step.used.end());
    is_used_known_ = true;
  }
}

void AdamCudaTable::begin(const AdamCudaStep& step, Stream& stream) {
  validate(step);
  flags_ = step;
  flags_.groups = {};
  flags_.lr = {};
  flags_.used = {};
  CudaGuard guard(device_.id().index);
  last_use_.in(stream, "AdamCudaTable", [&](void* native, bool is_captured) {
    upload_tables(step, stream, is_captured);
    launch_scalars(step, native);
  });
}

void AdamCudaTable::launch_scalars(const AdamCudaStep& step, void* native) {
  AdamScalarsLaunch launch;
  launch.rows = device_rows_.as<const AdamCudaRow>();
  launch.scalars = device_scalars_.as<AdamCudaScalars>();
  launch.row_count = rows();
  launch.steps = step.steps;
  launch.param_count = step.param_count;
  launch.used = step.used.empty() ? nullptr : device_used_.as<const uint8_t>();
  launch.factors = step.factors;
  launch.average = step.average;
  launch.noop = step.noop;
  launch.decoupled = step.decoupled;
  launch.maximize = step.maximize;
  for (size_t first = 0; first < step.groups.size(); first += AdamScalarsLaunch::kMaxGroups) {
    const size_t count = std::min<size_t>(AdamScalarsLaunch::kMaxGroups, step.groups.size() - first);
    launch.counts_steps = first == 0;
    launch.first_group = static_cast<int32_t>(first);
    launch.group_count = static_cast<int32_t>(count);
    for (size_t i = 0; i < count; ++i) {
      launch.groups[i] = step.groups[first + i];
      launch.lr[i] = step.lr.empty() ? nullptr : step.lr[first + i];
    }
    BW_CUDA_TRY(launch_adam_scalars, launch, native);
  }
}

void AdamCudaTable::step(int64_t first_row, int64_t last_row, Stream& stream) {
  BW_EXPECTS(0 <= first_row && first_row <= last_row && last_row <= rows(),
             "rows [" + std::to_string(first_row) + ", " + std::to_string(last_row) + ") of " + std::to_string(rows()));
  BW_EXPECTS(!are_rows_new_, "step() was called before begin()");
  CudaGuard guard(device_.id().index);
  last_use_.in(stream, "AdamCudaTable", [&](void* native, bool) { launch_rows(first_row, last_row, native); });
}

void AdamCudaTable::launch_rows(int64_t first_row, int64_t last_row, void* native) {
  AdamLaunch launch;
  launch.rows = device_rows_.as<const AdamCudaRow>();
  launch.first_chunk = device_chunks_.as<const int64_t>();
  launch.scalars = device_scalars_.as<const AdamCudaScalars>();
  launch.decoupled = flags_.decoupled;
  launch.stochastic = flags_.stochastic;
  launch.resync = flags_.resync;
  launch.seed = flags_.seed;
  launch.max_blocks = device_.fill_blocks(kCudaBlockThreads);
  for (int64_t first = first_row; first < last_row; first = launch.last_row) {  // a launch for each run of one variant
    launch.variant = rows_[static_cast<size_t>(first)].variant();
    launch.first_row = first;
    launch.last_row = first + 1;
    while (launch.last_row < last_row && rows_[static_cast<size_t>(launch.last_row)].variant() == launch.variant) {
      ++launch.last_row;
    }
    launch.chunks = segments_.first_chunk(launch.last_row) - segments_.first_chunk(first);
    if (launch.chunks > 0) {
      BW_CUDA_TRY(launch_adam, launch, native);
    }
  }
}

}  // namespace bucketwheel
