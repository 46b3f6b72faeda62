// AdamCudaTable: the rows of the fused Adam in device memory, and a step over them. The host side of adam_cuda.h.
//
// A step is two calls. begin() counts the steps and makes all rows' scalars on the device, in one small kernel; step()
// updates a range of rows, and may be called for several ranges. Neither blocks the host or, after the first step,
// allocates. Only what has changed since the last step is uploaded. Both can be captured in a CUDA graph, whose
// replays read steps, factors, noop and learning rates anew.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/cuda_buffer.h"
#include "device/last_use.h"
#include "kernels/adam_cuda.h"
#include "kernels/adam_variant.h"
#include "kernels/segment_table.h"

namespace bucketwheel {

// Pointers are device memory, spans are host memory. Arrays by parameter have `param_count` entries.
struct AdamCudaStep {
  std::span<const AdamGroup> groups;  // indexed by AdamRow::group
  std::span<const float* const> lr;   // by group; not null: the learning rate, read when the step runs. Empty: all null
  int64_t* steps = nullptr;           // by parameter: the steps taken; those in use are counted up
  int64_t param_count = 0;
  std::span<const uint8_t> used;    // by parameter; empty: all
  const double* factors = nullptr;  // of each parameter's gradient; null: 1
  double average = 1.0;             // of every gradient
  const float* noop = nullptr;      // points to a number that is not 0 when the step runs: nothing changes
  bool decoupled = true;
  bool maximize = false;
  bool stochastic = true;  // rounding of a bfloat16 v
  bool resync = false;     // masters follow what others have written to their parameters
  uint64_t seed = 0;
};

class AdamCudaTable {
 public:
  explicit AdamCudaTable(CudaDevice& device);

  // As AdamTable's, for arrays on the device. `place`: the parameter's index in the arrays by parameter of each step.
  int64_t add(const AdamRow& row, uint32_t place);
  int64_t add(const AdamRow& row) { return add(row, row.param); }
  void set_grad(int64_t row, const void* g, DType g_dtype);
  // Forgets the rows; the device memory stays for the next ones.
  void clear();

  // ValueError, with nothing enqueued: a group or parameter out of range, a used row without a gradient.
  void begin(const AdamCudaStep& step, Stream& stream);
  // The rows [first_row, last_row), with the scalars of the last begin(), in any stream.
  void step(int64_t first_row, int64_t last_row, Stream& stream);

  int64_t rows() const { return segments_.rows(); }
  int64_t numel() const { return segments_.first_element(rows()); }
  CudaDevice& device() const { return device_; }

 private:
  void validate(const AdamCudaStep& step) const;
  void upload_tables(const AdamCudaStep& step, Stream& stream, bool is_captured);
  void launch_scalars(const AdamCudaStep& step, void* native);
  void launch_rows(int64_t first_row, int64_t last_row, void* native);

  CudaDevice& device_;
  SegmentTable segments_;
  std::vector<AdamCudaRow> rows_;
  std::vector<AdamCudaRow> uploaded_rows_;  // the content of device_rows_
  std::vector<uint8_t> used_;               // what device_used_ holds, if that is known
  bool is_used_known_ = false;
  bool are_rows_new_ = false;  // since the last begin(); they may still be equal
  bool are_chunks_new_ = false;
  bool was_captured_ = false;  // replays change the device's tables unseen, so their content is unknown
  AdamCudaStep flags_;         // of the last begin(), without its spans

  CudaBuffer device_rows_;
  CudaBuffer device_chunks_;
  CudaBuffer device_used_;
  CudaBuffer device_scalars_;
  LastUse last_use_;
};

}  // namespace bucketwheel
