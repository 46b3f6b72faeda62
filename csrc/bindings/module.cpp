// bucketwheel._cpu: one bind_<stem>() of each <stem>_py.h.
#include <pybind11/pybind11.h>

#include "bindings/adam_cuda_py.h"
#include "bindings/adam_py.h"
#include "bindings/c10d_py.h"
#include "bindings/comm_py.h"
#include "bindings/crc32c_py.h"
#include "bindings/device_py.h"
#include "bindings/error_py.h"
#include "bindings/grad_table_py.h"
#include "bindings/nccl_py.h"
#include "bindings/norm_cuda_py.h"
#include "bindings/norm_py.h"
#include "bindings/pack_py.h"
#include "bindings/peers_py.h"
#include "bindings/placement_py.h"
#include "bindings/pool_py.h"
#include "bindings/residency_py.h"
#include "bindings/step_py.h"
#include "bindings/window_py.h"

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "The native core of bucketwheel.";
  bucketwheel::bind_error(m);
  bucketwheel::bind_device(m);
  bucketwheel::bind_cuda(m);
  bucketwheel::bind_pool(m);
  bucketwheel::bind_pack(m);
  bucketwheel::bind_adam(m);
  bucketwheel::bind_adam_cuda(m);
  bucketwheel::bind_crc32c(m);
  bucketwheel::bind_comm(m);
  bucketwheel::bind_peers(m);
  bucketwheel::bind_nccl(m);
  bucketwheel::bind_c10d(m);
  bucketwheel::bind_norm(m);
  bucketwheel::bind_norm_cuda(m);
  bucketwheel::bind_placement(m);
  bucketwheel::bind_grad_table(m);
  bucketwheel::bind_window(m);
  bucketwheel::bind_step(m);
  bucketwheel::bind_residency(m);
}
