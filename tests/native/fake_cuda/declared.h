// A CUDA table around another one, whose kernels say which bytes they read and write: [Note: checked streams] in queues.h.
#pragma once

#include "device/cuda_api.h"

// The table to install in the place of `api`; one of a process. fake_cuda_declared is the same for Python.
const bucketwheel::CudaApi& declared(const bucketwheel::CudaApi& api);
