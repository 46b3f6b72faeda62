// The Adam kernels on CUDA: the arguments of a launch. Pointers are device memory. The host side is adam_table_cuda.h.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/adam_math.h"
#include "kernels/adam_variant.h"

namespace bucketwheel {

// One row in device memory. `head`: from this element on, every array is 16-byte aligned and a block of random bits
// begins; kUnaligned: there is no such element.
struct AdamCudaRow : AdamRow {
  static constexpr uint8_t kUnaligned = 255;
  uint32_t place = 0;  // index of its step, use and factor in the arrays by parameter
  uint8_t head = kUnaligned;
  bool operator==(const AdamCudaRow&) const = default;
};

// The scalars of a row, made on the device by launch_adam_scalars.
struct AdamCudaScalars {
  AdamScalarsOf<double> scalars;  // rounded to float32 by rows that are not float64
  int64_t step;
  int32_t is_active;  // used, and no noop
};

inline constexpr int64_t kAdamCudaChunkNumel = 8192;

// Rows [first_row, last_row), all of `variant`. first_chunk[r]: how many chunks the rows before r have in the whole
// table; its last entry counts all. A row has ceil(numel / kAdamCudaChunkNumel) chunks, whatever its head.
struct AdamLaunch {
  AdamVariant variant;
  const AdamCudaRow* rows = nullptr;
  const int64_t* first_chunk = nullptr;
  const AdamCudaScalars* scalars = nullptr;  // by row
  int64_t first_row = 0;
  int64_t last_row = 0;
  int64_t chunks = 0;  // of these rows
  bool decoupled = true;
  bool stochastic = true;  // bfloat16 v is rounded stochastically; m always to nearest
  bool resync = false;     // AdamWeight::kMaster follows what others have written to the parameter
  uint64_t seed = 0;
  int max_blocks = 0;  // of the grid
};

// Counts the steps of all used parameters and makes the scalars of all rows, in one block.
struct AdamScalarsLaunch {
  static constexpr int kMaxGroups = 64;  // more: several launches
  const AdamCudaRow* rows = nullptr;
  AdamCudaScalars* scalars = nullptr;
  int64_t row_count = 0;
  int64_t* steps = nullptr;  // by parameter: the steps taken, counted up here unless `counts_steps` is false
  int64_t param_count = 0;
  const uint8_t* used = nullptr;    // by parameter; null: all
  const double* factors = nullptr;  // of the gradient, by parameter; null: 1
  double average = 1.0;             // of all gradients
  const float* noop = nullptr;      // points to a number that is not 0: nothing changes, not even steps
  bool counts_steps = true;         // in the first of several launches
  bool decoupled = true;
  bool maximize = false;
  int32_t first_group = 0;  // rows of the groups [first_group, first_group + group_count)
  int32_t group_count = 0;
  AdamGroup groups[kMaxGroups];
  const float* lr[kMaxGroups] = {};  // not null: the group's learning rate, read when the kernel runs (capturable)
};

// Each enqueues its kernel and returns a cudaError_t: "invalid value", with nothing enqueued, for an unknown variant
// or impossible sizes.
int launch_adam(const AdamLaunch& launch, void* stream);
int launch_adam_scalars(const AdamScalarsLaunch& launch, void* stream);

}  // namespace bucketwheel
