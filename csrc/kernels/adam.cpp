#include "kernels/adam.h"

#include <string>

#include "base/thread_pool.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

// About 25 us of work: what a thread takes at once. Less is not worth waking a thread for.
constexpr int64_t kAdamGrainNumel = 16384;

}  // namespace

void expect_adam_row(const AdamRow& row, int64_t index) {
  BW_EXPECTS(row.param_begin >= 0 && row.param < (1u << 30), "row " + std::to_string(index) + " is of parameter " +
                                                                 std::to_string(row.param) + " from element " +
                                                                 std::to_string(row.param_begin));
}

int64_t AdamTable::add(const AdamRow& row) {
  expect_adam_row(row, rows());
  segments_.add(row.numel);
  rows_.push_back(row);
  return rows() - 1;
}

void AdamTable::set_grad(int64_t row, const void* g, DType g_dtype) {
  AdamRow& to = rows_[static_cast<size_t>(row)];
  to.g = g;
  to.g_dtype = g_dtype;
}

void AdamTable::validate(const AdamStep& step) const {
  const auto expect_rows = [this](size_t size, const char* what) {
    BW_EXPECTS(static_cast<int64_t>(size) == rows(),
               std::string(what) + " has " + std::to_string(size) + " entries for " + std::to_string(rows()) + " rows");
  };
  BW_EXPECTS(0 <= step.first_row && step.first_row <= step.last_row && step.last_row <= rows(),
             "rows [" + std::to_string(step.first_row) + ", " + std::to_string(step.last_row) + ") of " +
                 std::to_string(rows()));
  expect_rows(step.steps.size(), "steps");
  if (!step.used.empty()) {
    expect_rows(step.used.size(), "used");
  }
  if (step.gscale.size() > 1) {
    expect_rows(step.gscale.size(), "gscale");
  }
  for (int64_t r = step.first_row; r < step.last_row; ++r) {
    if (!step.used.empty() && step.used[static_cast<size_t>(r)] == 0) {
      continue;
    }
    const AdamRow& row = this->row(r);
    BW_EXPECTS(row.group >= 0 && row.group < static_cast<int64_t>(step.groups.size()),
               "row " + std::to_string(r) + " is of group " + std::to_string(row.group) + " of " +
                   std::to_string(step.groups.size()));
    BW_EXPECTS(row.g != nullptr || row.numel == 0, "row " + std::to_string(r) + " has no gradient");
    BW_EXPECTS(step.steps[static_cast<size_t>(r)] >= 1, "row " + std::to_string(r) + " takes step " +
                                                            std::to_string(step.steps[static_cast<size_t>(r)]) +
                                                            ": steps count from 1");
  }
}

void AdamTable::fill_scalars(const AdamStep& step) {
  scalars_.resize(rows_.size());
  const AdamScalarsOf<double>* last = nullptr;  // rows in sequence mostly share everything, and the powers are not free
  int32_t last_group = 0;
  int64_t last_step = 0;
  double last_gscale = 0;
  for (size_t r = static_cast<size_t>(step.first_row); r < static_cast<size_t>(step.last_row); ++r) {
    if (!step.used.empty() && step.used[r] == 0) {
      continue;
    }
    const double gscale = step.gscale.empty() ? 1.0 : step.gscale[step.gscale.size() == 1 ? 0 : r];
    if (last != nullptr && rows_[r].group == last_group && step.steps[r] == last_step && gscale == last_gscale) {
      scalars_[r] = *last;
    } else {
      last_group = rows_[r].group;
      last_step = step.steps[r];
      last_gscale = gscale;
      scalars_[r] =
          adam_scalars(step.groups[static_cast<size_t>(last_group)], last_step, gscale, step.decoupled, step.maximize);
    }
    last = &scalars_[r];
  }
}

void AdamTable::step(const AdamStep& step) {
  validate(step);
  if (step.noop != nullptr && *step.noop != 0.0F) {
    return;
  }
  fill_scalars(step);
  const CpuKernels& kernels = cpu_kernels();
  const int64_t first_chunk = segments_.first_chunk(step.first_row);
  const int64_t chunks = segments_.first_chunk(step.last_row) - first_chunk;
  const int64_t numel = segments_.first_element(step.last_row) - segments_.first_element(step.first_row);
  parallel_for(chunks, SegmentTable::grain(chunks, numel, kAdamGrainNumel), [&](int64_t begin, int64_t end) {
    SegmentTable::Chunk chunk = segments_.chunk(first_chunk + begin);
    for (int64_t i = begin;;) {
      const auto r = static_cast<size_t>(chunk.row);
      if (step.used.empty() || step.used[r] != 0) {
        const AdamPass pass = {chunk.begin,    chunk.numel,     step.steps[r], step.seed,
                               step.decoupled, step.stochastic, step.resync};
        kernels.adam(rows_[r], pass, scalars_[r]);
      }
      if (++i == end) {
        break;
      }
      chunk = segments_.next(chunk);
    }
  });
}

}  // namespace bucketwheel
