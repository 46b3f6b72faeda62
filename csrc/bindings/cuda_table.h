// The table that bucketwheel._cuda hands over; made in cuda_runtime.cu.
#pragma once

#include "device/cuda_api.h"

namespace bucketwheel {

const CudaApi& cuda_table();

}  // namespace bucketwheel
