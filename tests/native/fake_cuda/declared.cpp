#include "declared.h"

#include <cstddef>
#include <cstdint>

#include "kernels/adam_cuda.h"
#include "kernels/norm_cuda.h"
#include "kernels/pack_cuda.h"
#include "queues.h"

using namespace bucketwheel;

namespace {

const CudaApi* real = nullptr;

// Of the kernel that runs.
struct Says {
  const char* kernel;
  template <class T>
  void reads(const T* data, int64_t count = 1) const {
    says(data, count, sizeof(T), false);
  }
  template <class T>
  void writes(const T* data, int64_t count = 1) const {
    says(data, count, sizeof(T), true);
  }
  void reads(const void* data, int64_t count, DType dtype) const { says(data, count, size_of(dtype), false); }
  void writes(const void* data, int64_t count, DType dtype) const { says(data, count, size_of(dtype), true); }

 private:
  void says(const void* data, int64_t count, size_t size, bool writes) const {
    if (data != nullptr) {
      fake_cuda::access(data, static_cast<size_t>(count) * size, writes, kernel);
    }
  }
};

void declare(const Says& it, const AdamLaunch& launch) {
  const int64_t rows = launch.last_row - launch.first_row;
  it.reads(launch.rows + launch.first_row, rows);
  it.reads(launch.first_chunk + launch.first_row, rows + 1);
  it.reads(launch.scalars + launch.first_row, rows);
  for (int64_t r = launch.first_row; r < launch.last_row; ++r) {
    const AdamCudaRow& row = launch.rows[r];
    if (launch.scalars[r].is_active == 0) {
      continue;
    }
    it.reads(row.g, row.numel, row.g_dtype);
    it.writes(row.p, row.numel, launch.variant.p_dtype);
    for (void* const state : {row.m, row.v, row.vmax}) {
      it.writes(state, row.numel, launch.variant.state_dtype);
    }
    it.writes(row.master, row.numel, launch.variant.weight == AdamWeight::kMaster ? DType::kFloat32 : DType::kBFloat16);
  }
}

void declare(const Says& it, const AdamScalarsLaunch& launch) {
  it.reads(launch.rows, launch.row_count);
  it.reads(launch.used, launch.param_count);
  it.reads(launch.factors, launch.param_count);
  it.reads(launch.noop);
  for (int32_t group = 0; group < launch.group_count; ++group) {
    it.reads(launch.lr[group]);
  }
  it.writes(launch.steps, launch.param_count);
  for (int64_t r = 0; r < launch.row_count; ++r) {
    const int32_t group = launch.rows[r].group - launch.first_group;
    if (group >= 0 && group < launch.group_count) {
      it.writes(launch.scalars + r);
    }
  }
}

void declare(const Says& it, const SumsqLaunch& launch) {
  it.reads(launch.rows, launch.row_count);
  it.reads(launch.first_chunk, launch.row_count + 1);
  it.writes(launch.partial, launch.chunks);
  for (int64_t r = 0; r < launch.row_count; ++r) {
    it.reads(launch.rows[r].data, launch.rows[r].numel, launch.rows[r].dtype);
  }
}

void declare(const Says& it, const AccumulateLaunch& launch) {
  int64_t numel = 0;
  for (int64_t r = 0; r < launch.sums.row_count; ++r) {
    numel += launch.sums.rows[r].numel;
  }
  declare(it, launch.sums);
  for (int rank = 0; rank < launch.world; ++rank) {
    it.reads(launch.sources[rank], numel, launch.dtype);
  }
  it.writes(launch.shard, numel, launch.shard_dtype);
}

void declare(const Says& it, const FoldLaunch& launch) {
  it.reads(launch.rows, launch.row_count);
  it.reads(launch.first_chunk, launch.row_count + 1);
  it.reads(launch.partial, launch.first_chunk[launch.row_count]);
  it.writes(launch.sums, launch.row_count);
}

void declare(const Says& it, const ParamSumsLaunch& launch) {
  it.reads(launch.first_row_of, launch.param_count + 1);
  it.reads(launch.rows_of, launch.first_row_of[launch.param_count]);
  for (int64_t i = 0; i < launch.first_row_of[launch.param_count]; ++i) {
    it.reads(launch.sums + launch.rows_of[i]);
  }
  it.reads(launch.held, launch.param_count);
  it.writes(launch.param_sums, launch.param_count);
}

void declare(const Says& it, const RankSumsLaunch& launch) {
  it.reads(launch.by_rank, launch.world * launch.param_count);
  it.writes(launch.sums, launch.param_count);
}

void declare(const Says& it, const ClipLaunch& launch) {
  it.reads(launch.param_sums, launch.param_count);
  it.reads(launch.chosen, launch.param_count);
  if (launch.resets || launch.clips) {
    it.writes(launch.factors, launch.param_count);
  } else {
    it.reads(launch.factors, launch.param_count);
  }
  it.writes(launch.norm, 1, launch.is_double ? DType::kFloat64 : DType::kFloat32);
  it.writes(launch.param_norms, launch.param_count);
}

void declare(const Says& it, const CopyLaunch& launch) {
  for (int64_t i = 0; i < launch.item_count; ++i) {
    const CopyItem& item = launch.items[i];
    it.reads(item.from, item.numel, item.from_dtype);
    if (item.from != nullptr || !item.add) {
      it.writes(item.to, item.numel, item.to_dtype);  // and reads, where it adds: a write is in order with both
    }
  }
}

void declare(const Says& it, const ReduceLaunch& launch) {
  for (int rank = 0; rank < launch.world; ++rank) {
    it.reads(launch.sources[rank], launch.numel, launch.dtype);
  }
  it.writes(launch.to, launch.numel, launch.dtype);
}

template <class Launch>
int call(int (*CudaApi::*member)(const Launch&, void*), const char* name, const Launch& launch, void* stream) {
  if (fake_cuda::is_checked()) {
    fake_cuda::enqueue(static_cast<cudaStream_t>(stream), [=] { declare({name}, launch); });
  }
  return (real->*member)(launch, stream);
}

}  // namespace

const CudaApi& declared(const CudaApi& api) {
  static CudaApi made;
  real = &api;
  made = api;
#define BW_DECLARED(Launch, name) \
  made.name = [](const Launch& launch, void* stream) { return call(&CudaApi::name, #name, launch, stream); };
  BW_DECLARED(AdamLaunch, launch_adam)
  BW_DECLARED(AdamScalarsLaunch, launch_adam_scalars)
  BW_DECLARED(SumsqLaunch, launch_sumsq)
  BW_DECLARED(AccumulateLaunch, launch_accumulate)
  BW_DECLARED(FoldLaunch, launch_fold)
  BW_DECLARED(ParamSumsLaunch, launch_param_sums)
  BW_DECLARED(RankSumsLaunch, launch_rank_sums)
  BW_DECLARED(ClipLaunch, launch_clip)
  BW_DECLARED(CopyLaunch, launch_copy)
  BW_DECLARED(ReduceLaunch, launch_reduce)
#undef BW_DECLARED
  return made;
}

extern "C" __attribute__((visibility("default"))) const void* fake_cuda_declared(const void* api) {
  return &declared(*static_cast<const CudaApi*>(api));
}
