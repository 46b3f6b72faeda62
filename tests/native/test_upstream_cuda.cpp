// pool/upstream_cuda: slabs of virtual memory on the simulated device: where they lie, what they hold while they sleep, and
// what fails. Run by test_native.py.
// runs: address
// needs: base device kernels pool cuda_runtime fake_cuda fibers adam_cuda adam_scalars_cuda norm_cuda norm_fold_cuda pack_cuda
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "base/error.h"
#include "bindings/cuda_table.h"
#include "check.h"
#include "counted_cuda.h"
#include "device/device_cuda.h"
#include "pools.h"

using namespace bucketwheel;

extern "C" {
size_t fake_cuda_allocated_bytes();
}

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kBytes = 2 * kGranularity;

// How many ranges are reserved, handles held and ranges mapped, if a call of `failed` has failed.
std::array<uint64_t, 3> in_use(CudaCall failed = CudaCall::get_device) {
  const auto made = [failed](CudaCall call) { return cuda_calls(call) - (call == failed ? 1 : 0); };
  return {made(CudaCall::mem_address_reserve) - made(CudaCall::mem_address_free),
          made(CudaCall::mem_create) - made(CudaCall::mem_release),
          made(CudaCall::mem_map) - made(CudaCall::mem_unmap)};
}

// How the kernel lets us use the memory there; "": it is not mapped.
std::string access_to(const std::byte* data) {
  std::ifstream maps("/proc/self/maps");
  uintptr_t begin = 0;
  uintptr_t end = 0;
  char dash = 0;
  std::string access;
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (std::string line; std::getline(maps, line);) {
    if (std::istringstream(line) >> std::hex >> begin >> dash >> end >> access && begin <= address && address < end) {
      return access;
    }
  }
  return "";
}

void expect_awake(const Slab& slab, const std::byte* data) {
  CHECK(slab.data == data && slab.size_bytes == kBytes);
  CHECK(access_to(data) == "rw-p" && access_to(data + kBytes - 1) == "rw-p");
  CHECK(fake_cuda_allocated_bytes() == kBytes);
  std::memset(slab.data, 7, kBytes);
}

void expect_asleep(const Slab& slab, const std::byte* data) {
  CHECK(slab.data == data && slab.size_bytes == kBytes);
  CHECK(access_to(data) == "---p" && access_to(data + kBytes - 1) == "---p");
  CHECK(fake_cuda_allocated_bytes() == 0);
}

}  // namespace

TEST(a_slab_sleeps_and_wakes_at_its_address) {
  const auto before = in_use();
  SlabRef slab = make_vmm_upstream(0)->allocate(kGranularity + 1);
  std::byte* const data = slab->data;
  CHECK(slab->size_bytes == kBytes && holds_only(data, kBytes, 0));
  for (int turn = 0; turn < 3; ++turn) {
    expect_awake(*slab, data);
    CHECK(slab->sleep() && slab->sleep());
    expect_asleep(*slab, data);
    slab->wake();
    slab->wake();
  }
  expect_awake(*slab, data);
  slab.reset();
  CHECK(access_to(data).empty() && fake_cuda_allocated_bytes() == 0 && in_use() == before);
}

TEST(a_sleeping_slab_ends_and_one_from_malloc_cannot_sleep) {
  const auto before = in_use();
  SlabRef slab = make_vmm_upstream(0)->allocate(kBytes);
  const std::byte* const data = slab->data;
  slab->sleep();
  slab.reset();
  CHECK(access_to(data).empty() && in_use() == before);
  slab = make_cuda_upstream(0)->allocate(kBytes);
  CHECK(!slab->sleep() && fake_cuda_allocated_bytes() == kBytes);
  slab.reset();
  CHECK(fake_cuda_allocated_bytes() == 0 && in_use() == before);
}

TEST(a_call_that_fails_leaves_nothing_behind) {
  const UpstreamRef from = make_vmm_upstream(0);
  for (const CudaCall call :
       {CudaCall::mem_address_reserve, CudaCall::mem_create, CudaCall::mem_map, CudaCall::mem_set_access}) {
    const auto before = in_use();
    plan_cuda_fault({call, 1, 719, 0});
    CHECK_THROWS(DeviceError, name_of(call), from->allocate(kBytes));
    CHECK(in_use(call) == before && fake_cuda_allocated_bytes() == 0);
  }
  const SlabRef slab = from->allocate(kBytes);
  std::byte* const data = slab->data;
  slab->sleep();
  for (const CudaCall call : {CudaCall::mem_create, CudaCall::mem_map, CudaCall::mem_set_access}) {
    plan_cuda_fault({call, 1, 719, 0});
    CHECK_THROWS(DeviceError, name_of(call), slab->wake());
    expect_asleep(*slab, data);
  }
  slab->wake();
  expect_awake(*slab, data);
}

int main(int argc, char** argv) {
  install_cuda_api(&counted(cuda_table()));
  return run_tests(argc, argv);
}
