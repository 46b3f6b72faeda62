"""csrc/comm/nccl/api.h says what the real nccl.h says: one source includes both, and the compiler compares them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bucketwheel.native import toolchain
from tests.native.cmake import BUILD_TIMEOUT_S, ROOT
from tests.support.requirements import need_nccl

# What nccl.h asks of CUDA's headers: size_t and a stream's type, and no more as long as CUDART_VERSION is not defined.
CUDA_STUBS = {"cuda_runtime.h": "#include <stddef.h>\ntypedef struct CUstream_st* cudaStream_t;\n", "cuda_fp16.h": ""}

# Ours and theirs: the same name but for its first letters, or as said.
CONSTANTS = {
    f"kNccl{name}": f"nccl{name}"
    for name in (
        "Success UnhandledCudaError SystemError InternalError InvalidArgument InvalidUsage RemoteError InProgress Timeout "
        "Sum Avg ScalarHostImmediate"
    ).split()
} | {
    "kNcclUndefined": "NCCL_CONFIG_UNDEF_INT",
    "kNcclSplitNoColor": "NCCL_SPLIT_NOCOLOR",
    "kNcclCtaPolicyDefault": "NCCL_CTA_POLICY_DEFAULT",
    "kNcclCtaPolicyEfficiency": "NCCL_CTA_POLICY_EFFICIENCY",
    "kNcclCtaPolicyZero": "NCCL_CTA_POLICY_ZERO",
    "kNcclWindowDefault": "NCCL_WIN_DEFAULT",
    "kNcclWindowSymmetric": "NCCL_WIN_COLL_SYMMETRIC",
    "kNcclWindowAlignment": "NCCL_WIN_REQUIRED_ALIGNMENT",
}
TYPES = {f"k{name}": f"nccl{name}" for name in "Int8 Int32 Int64 Float16 Float32 Float64".split()}
TYPES |= {"kUInt8": "ncclUint8", "kUInt32": "ncclUint32", "kUInt64": "ncclUint64", "kBFloat16": "ncclBfloat16"}
CONFIG = dict(
    zip(
        "size_bytes magic version blocking cga_cluster_size min_ctas max_ctas net_name split_share traffic_class comm_name "
        "collnet_enable cta_policy".split(),
        "size magic version blocking cgaClusterSize minCTAs maxCTAs netName splitShare trafficClass commName "
        "collnetEnable CTAPolicy".split(),
        strict=True,
    )
)
# Two parameters fit when both are of one size and of one kind: what the C ABI passes them by.
SOURCE = """
#include <nccl.h>
#include <cstddef>
#include <type_traits>
#include "comm/nccl/api.h"
namespace bw = bucketwheel;

// What came later than the version at hand, which torch may have brought. The one of constraints.txt has it all.
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 30, 0)
constexpr int ncclTimeout = 8;
#endif
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 0)
#define NCCL_API_MAGIC 0xcafebeef
#endif
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 0)
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CTA_POLICY_ZERO 2
#define NCCL_REVOKE_DEFAULT 0
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
#endif

enum class Kind { kNothing, kPointer, kWhole, kStruct };
template <class T>
constexpr Kind kind_of() {
  if (std::is_void_v<T>) return Kind::kNothing;
  if (std::is_pointer_v<T>) return Kind::kPointer;
  if (std::is_integral_v<T> || std::is_enum_v<T>) return Kind::kWhole;
  return Kind::kStruct;
}
template <class T>
constexpr bool is_scalar = std::is_pointer_v<T> || std::is_enum_v<T> || std::is_integral_v<T>;
template <class A, class B>
constexpr bool fit() {
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using To = std::remove_pointer_t<A>;
    using From = std::remove_pointer_t<B>;
    // What is written through a pointer has the size that the other side declared. Opaque types have none.
    if constexpr (is_scalar<To> && is_scalar<From>) {
      return kind_of<To>() == kind_of<From>() && sizeof(To) == sizeof(From);
    } else {
      return !is_scalar<To> && !is_scalar<From>;
    }
  } else {
    return kind_of<A>() == kind_of<B>() && sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
  }
}
template <class A, class B>
struct Same : std::false_type {};
template <class R, class... A, class S, class... B>
struct Same<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return fit<R, S>() && (fit<A, B>() && ... && true);
    } else {
      return false;
    }
  }();
};
#define COMPARE(name, symbol, returns, parameters) \\
  static_assert(Same<decltype(bw::NcclApi::name), decltype(&::symbol)>::value, #symbol);
BW_NCCL_REQUIRED(COMPARE)
BW_NCCL_OPTIONAL(COMPARE)

static_assert(sizeof(bw::NcclUniqueId) == sizeof(ncclUniqueId) && alignof(bw::NcclUniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(bw::NcclConfig) <= sizeof(ncclConfig_t) && alignof(bw::NcclConfig) == alignof(ncclConfig_t));
static_assert(bw::NcclConfig{}.magic == NCCL_API_MAGIC && bw::NcclConfig{}.version <= NCCL_VERSION_CODE);
// The prefix ends where the next member begins: no byte of it belongs to one that is not declared.
static_assert(sizeof(bw::NcclConfig) == offsetof(ncclConfig_t, shrinkShare));
"""


def source() -> str:
    lines = [f"static_assert(bw::{ours} == {real});" for ours, real in CONSTANTS.items()]
    lines += [f"static_assert(static_cast<int>(bw::NcclType::{ours}) == {real});" for ours, real in TYPES.items()]
    for ours, real in CONFIG.items():
        at = f"offsetof(bw::NcclConfig, {ours}) == offsetof(ncclConfig_t, {real})"
        size = f"sizeof(bw::NcclConfig::{ours}) == sizeof(ncclConfig_t::{real})"
        lines.append(f"static_assert({at} && {size});")
    return "\n".join([SOURCE, *lines, ""])


def compile_beside(nccl_h: Path, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for name, stub in CUDA_STUBS.items():
        (folder / name).write_text(stub)
    place = folder / "compare.cpp"
    place.write_text(text)
    recipe = toolchain.read_recipe(ROOT / "csrc")
    argv = [*toolchain.find_toolchain().cxx, *recipe.flags, "-Wno-deprecated-declarations", "-fsyntax-only"]
    argv += [f"-I{recipe.csrc}", f"-I{folder}", f"-I{nccl_h.parent}", str(place)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)


def test_declarations_are_those_of_nccl(tmp_path: Path) -> None:
    done = compile_beside(need_nccl() / "include" / "nccl.h", source(), tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]


def test_every_declaration_is_compared() -> None:
    text = (ROOT / "csrc" / "comm" / "nccl" / "api.h").read_text()
    assert set(re.findall(r"inline constexpr \w+ (kNccl\w+) =", text)) - {"kNcclOldest"} == set(CONSTANTS)
    types = re.search(r"enum class NcclType : int \{(.*?)\};", text, re.DOTALL)
    config = re.search(r"struct NcclConfig \{(.*?)\};", text, re.DOTALL)
    assert types and config
    assert set(re.findall(r"(k\w+) =", types[1])) == set(TYPES)
    assert set(re.findall(r"(\w+) = ", config[1])) == set(CONFIG)
