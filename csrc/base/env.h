// Every BW_* environment variable of the native core, read once, at first use.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/platform.h"

namespace bucketwheel {

struct Env {
  // BW_HOST_STREAM=inline: a CPU stream runs a task at once, in the caller. Shows whether a failure is about ordering.
  bool stream_inline = false;
  // BW_HOST_STREAM_FUZZ=seed: random pauses before the tasks of CPU streams. Finds missing waits.
  std::optional<uint64_t> stream_fuzz_seed;
  // BW_POOL_POISON=1: PoolOptions::poison for every pool.
  bool pool_poison = false;
  // BW_CPU_ISA=plain|avx2|avx512: the CPU kernels to use. Unset: the best that the processor runs.
  std::optional<Isa> cpu_isa;
  // BW_TRACE_DIR=path: the folder in which a communicator that fails writes its last operations; made if missing.
  // Empty: nothing is written.
  std::string trace_dir;
  // BW_NCCL_LIB=path: the NCCL to use, an absolute path; empty: the one that torch loaded, else the first found.
  std::string nccl_lib;
};

// ValueError when a variable has a meaningless value.
const Env& env();

}  // namespace bucketwheel
