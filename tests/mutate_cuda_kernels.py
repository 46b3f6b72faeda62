"""Do the emulated CUDA tests notice a broken kernel? Breaks one line at a time in a copy of csrc and runs them on it.

    python tests/mutate_cuda_kernels.py [NAME ...]

Every mutant must be killed: the exit status is the number of survivors (or of mutations whose line is no longer there).
Takes some minutes: each mutant compiles a kernel again, under the sanitizers as in the default run, because some of these
mistakes show there only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "tests" / "native"
sys.path.insert(0, str(ROOT / "python"))

from bucketwheel.native import toolchain  # noqa: E402

ADAM = "test_adam_cuda"
SCALARS = "test_adam_scalars_cuda"
NORM = "test_norm_cuda"
PACK = "test_pack_cuda"
TESTS = [ADAM, SCALARS, NORM, PACK]
FLAGS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-unknown-pragmas", "-w"]

# name: (file in csrc/kernels/, text, replacement, test that must fail)
MUTANTS = {
    "every block accumulates every chunk": ("norm_cuda.cu", "index < sums.chunks; index += gridDim.x", "index < sums.chunks; ++index", NORM),
    "a block takes one chunk only": ("adam_cuda.cu", "chunk < first + launch.chunks; chunk += gridDim.x", "chunk < first + gridDim.x; chunk += gridDim.x", ADAM),
    "blocks of copies miss the last chunk": ("pack_cuda.cu", "chunk < launch.chunks; chunk += gridDim.x", "chunk < launch.chunks - 1; chunk += gridDim.x", PACK),
    "the search starts at the row after": ("pack_cuda.cu", "row_of_chunk(launch.first_chunk, index, launch", "row_of_chunk(launch.first_chunk, index + 1, launch", PACK),
    "the row of the chunk after": ("launch_cuda.h", "first_chunk[middle] <= chunk", "first_chunk[middle] <= chunk + 1", ADAM),
    "an empty grid is launched": ("launch_cuda.h", "blocks <= 0", "blocks < 0", ADAM),
    "halves of a word are swapped": ("lanes_cuda.h", "word[i / 2] >> (i % 2 * 16)", "word[i / 2] >> ((i + 1) % 2 * 16)", ADAM),
    "a half overwrites its neighbour": ("lanes_cuda.h", "(word[i / 2] & (i % 2 == 0 ? 0xffff0000u : 0x0000ffffu)) | shifted", "shifted", ADAM),
    "the second vector is not stored": ("lanes_cuda.h", "static_cast<uint32_t*>(at) + i, uint4", "static_cast<uint32_t*>(at), uint4", ADAM),
    "head ignored": ("adam_cuda.cu", "is_aligned ? row.head : 0;", "0;", ADAM),
    "unaligned rows in vectors": ("adam_cuda.cu", "is_aligned && aligned < end ? aligned : end", "aligned < end ? aligned : end", ADAM),
    "the first chunk begins after its head": ("adam_cuda.cu", "chunk == 0 ? 0 : aligned;", "aligned;", ADAM),
    "Adam skips the tail": ("adam_cuda.cu", "before + (end - tail);", "before;", ADAM),
    "Adam skips the last vector": ("adam_cuda.cu", "step < steps; step", "step < steps - 1; step", ADAM),
    "the last vector goes beyond the row": ("adam_cuda.cu", "static_cast<int>((end - body) / K::kLanes);", "static_cast<int>((end - body + K::kLanes - 1) / K::kLanes);", ADAM),
    "offsets of 32 bits": ("adam_cuda.cu", "const int64_t i = body + step * K::kLanes;", "const int64_t i = static_cast<uint32_t>(body) + step * K::kLanes;", ADAM),
    "inactive rows are stepped": ("adam_cuda.cu", "of_row.is_active == 0", "false", ADAM),
    "random bits by the place in the row": ("adam_cuda.cu", "lanes.run(common, row.param_begin + i);", "lanes.run(common, i);", ADAM),
    "random bits of v for p": ("adam_cuda.cu", "random_p = common.random(element, RandomUse::kParam);", "random_p = common.random(element, RandomUse::kExpAvgSq);", ADAM),
    "random bits of the first half for both": ("adam_cuda.cu", "K::kLanes == kRandomBlockNumel ? i : lane + i", "i", ADAM),
    "random bits out of order": ("adam_cuda.cu", "lane < 6 ? random.word[2]", "lane < 7 ? random.word[2]", ADAM),
    "one block of random bits for 16 elements": ("adam_cuda.cu", "element / kRandomBlockNumel, step, use", "element / (2 * kRandomBlockNumel), step, use", ADAM),
    "v to nearest where it should be stochastic": ("adam_cuda.cu", "to_bf16(vi, common.rounds_v, random_v, place)", "to_bf16(vi, false, random_v, place)", ADAM),
    "the master is not stored": ("adam_cuda.cu", "        master.set(i, weight);\n", "", ADAM),
    "the remainder of the last element": ("adam_cuda.cu", "join_master({p.bits16(i), master.bits16(i)})", "join_master({p.bits16(i), master.bits16(i | 1)})", ADAM),
    "vmax is not stored": ("adam_cuda.cu", "vmax.store(place<K::kState>(row.vmax, i));", "", ADAM),
    "float16 gradients read as bfloat16": ("adam_cuda.cu", "lanes.set(i, widen_fp16(lanes.bits16(i)));", "lanes.set(i, widen_bf16(lanes.bits16(i)));", ADAM),
    "gradients widened upwards": ("adam_cuda.cu", "for (int i = K::kLanes - 1; i >= 0; --i) {\n          lanes.set(i, widen_bf16", "for (int i = 0; i < K::kLanes; ++i) {\n          lanes.set(i, widen_bf16", ADAM),
    "scalars of the first row": ("adam_cuda.cu", "launch.scalars[row];", "launch.scalars[launch.first_row];", ADAM),
    "chunks from the start of the table": ("adam_cuda.cu", "chunk = first + blockIdx.x; chunk < first + launch.chunks;", "chunk = blockIdx.x; chunk < launch.chunks;", ADAM),
    "an unknown state dtype is float32": ("adam_cuda.cu", "    default:\n      return nullptr;\n  }\n}\n\ntemplate <DType kP>", "    default:\n      return with_amsgrad<kP, DType::kFloat32, kWeight>(variant.amsgrad);\n  }\n}\n\ntemplate <DType kP>", ADAM),
    "no barrier after counting steps": ("adam_scalars_cuda.cu", "__syncthreads();", "", SCALARS),
    "steps counted in every launch": ("adam_scalars_cuda.cu", "launch.counts_steps && !is_noop", "!is_noop", SCALARS),
    "noop counts steps": ("adam_scalars_cuda.cu", "launch.counts_steps && !is_noop", "launch.counts_steps", SCALARS),
    "a NaN is no noop": ("adam_scalars_cuda.cu", "*launch.noop != 0.0F", "(*launch.noop > 0.0F || *launch.noop < 0.0F)", SCALARS),
    "the learning rate of the host": ("adam_scalars_cuda.cu", "group.lr = *launch.lr[index];", "", SCALARS),
    "average ignored where there are factors": ("adam_scalars_cuda.cu", "launch.factors[param] * launch.average", "launch.factors[param]", SCALARS),
    "only some of the rows": ("adam_scalars_cuda.cu", "r += kBlockThreads", "r += launch.row_count", SCALARS),
    "the key of random bits for the place": ("adam_scalars_cuda.cu", "launch.rows[r].place", "launch.rows[r].param", SCALARS),
    "rows beyond the groups": ("adam_scalars_cuda.cu", "index >= static_cast<uint32_t>(launch.group_count)", "false", SCALARS),
    "squares in float": ("norm_cuda.cu", "lane = __builtin_fma(x, x, lane);", "lane += value * value;", NORM),
    "lanes added in a row": ("norm_cuda.cu", "(lanes[0] + lanes[1]) + (lanes[2] + lanes[3])", "((lanes[0] + lanes[1]) + lanes[2]) + lanes[3]", NORM),
    "neighbours before halves": ("norm_cuda.cu", "for (int half = 16; half > 0; half /= 2)", "for (int half = 1; half < 32; half *= 2)", NORM),
    "the last warp is left out": ("norm_cuda.cu", "warp < kWarps; ++warp", "warp < kWarps - 1; ++warp", NORM),
    "no barrier before warps are added": ("norm_cuda.cu", "  __syncthreads();\n  double total", "  double total", NORM),
    "no barrier between chunks": ("norm_cuda.cu", "    __syncthreads();  // `sums` is read; the next chunk writes it\n", "", NORM),
    "no barrier between chunks of a shard": ("norm_cuda.cu", "    __syncthreads();  // `block_sums` is read; the next chunk writes it\n", "", NORM),
    "fours beyond the end": ("norm_cuda.cu", "for (; i + kFour <= numel; i += kRowNumel)", "for (; i < numel; i += kRowNumel)", NORM),
    "misaligned data read as vectors": ("norm_cuda.cu", "% (kSizeOf<kType> * kFour) == 0;", "% 4 == 0;", NORM),
    "misaligned sources read as vectors": ("norm_cuda.cu", "return bits == 0;", "return (reinterpret_cast<uintptr_t>(launch.shard + first) % 16) == 0;", NORM),
    "the last rank is left out": ("norm_cuda.cu", "sum[row][j] = rank == 0 ?", "sum[row][j] = rank == 4 ? sum[row][j] : rank == 0 ?", NORM),
    "always stored, never added": ("norm_cuda.cu", "sum[row][lane] = stored.get(lane) + sum[row][lane];", "sum[row][lane] = sum[row][lane] + 0;", NORM),
    "padding is summed": ("norm_cuda.cu", "if (row.is_summed == 0) {\n      continue;", "if (row.is_summed == 2) {\n      continue;", NORM),
    "groups of 32": ("norm_fold_cuda.cu", "(first + thread) * kFoldGroup;", "(first + thread) * (kFoldGroup / 2);", NORM),
    "no more groups than threads": ("norm_fold_cuda.cu", "first < groups; first += kBlockThreads", "first < 1; first += kBlockThreads", NORM),
    "no barrier between groups and their sum": ("norm_fold_cuda.cu", "    sums[thread] = sum;\n    __syncthreads();", "    sums[thread] = sum;", NORM),
    "rows of other blocks": ("norm_fold_cuda.cu", "r += gridDim.x", "r += launch.row_count", NORM),
    "a parameter held elsewhere": ("norm_fold_cuda.cu", "launch.held == nullptr || launch.held[param] != 0", "true", NORM),
    "the sum of the first rank": ("norm_fold_cuda.cu", "rank < launch.world", "rank < 1", NORM),
    "the norm without its factors": ("norm_fold_cuda.cu", "sum * (factor * factor)", "sum", NORM),
    "norms after clipping": ("norm_fold_cuda.cu", "__builtin_fabs(factor)", "factor", NORM),
    "clipping divides": ("norm_fold_cuda.cu", "Real{1} / (norm + static_cast<Real>(1e-6)) * static_cast<Real>(launch.max_norm)", "static_cast<Real>(launch.max_norm) / (norm + static_cast<Real>(1e-6))", NORM),
    "a NaN coefficient becomes 1": ("norm_fold_cuda.cu", "coefficient > Real{1} ? Real{1} : coefficient", "coefficient < Real{1} ? coefficient : Real{1}", NORM),
    "clipping scales what was not chosen": ("norm_fold_cuda.cu", "is_chosen ? factor * coefficient : factor", "factor * coefficient", NORM),
    "factors are not reset before the norm": ("norm_fold_cuda.cu", "launch.factors == nullptr || launch.resets ? 1.0", "launch.factors == nullptr ? 1.0", NORM),
    "factors are reset only where they are clipped": ("norm_fold_cuda.cu", "if (launch.clips || launch.resets)", "if (launch.clips)", NORM),
    "no barrier before factors are clipped": ("norm_fold_cuda.cu", "  __syncthreads();\n  if (launch.clips ||", "  if (launch.clips ||", NORM),
    "copies skip what precedes the aligned": ("pack_cuda.cu", "k < body + (numel - tail)", "k < numel - tail", PACK),
    "copies skip the last few": ("pack_cuda.cu", "k < body + (numel - tail)", "k < body", PACK),
    "copies look at one side's alignment": ("pack_cuda.cu", "is_aligned_after<kBytes, kLanes>(to, head) &&", "true &&", PACK),
    "casts look at one side's alignment": ("pack_cuda.cu", "is_aligned_after<kSizeOf<kTo>, kLanes>(to, head) &&", "true &&", PACK),
    "sums ignore the target's alignment": ("pack_cuda.cu", "bool is_aligned = is_aligned_after<kSizeOf<kType>, kLanes>(launch.to, head);", "bool is_aligned = true;", PACK),
    "every chunk is the first": ("pack_cuda.cu", "(chunk - launch.first_chunk[index]) * kCopyCudaChunkNumel", "0 * kCopyCudaChunkNumel", PACK),
    "doubles straight to 16 bits": ("pack_cuda.cu", "return static_cast<float>(value);", "return value * (1 + 1e-12);", PACK),
    "int64 copied in halves": ("pack_cuda.cu", "copy_chunk<uint64_t>(to, from, numel);", "copy_chunk<uint32_t>(to, from, numel);", PACK),
    "the divisor is ignored": ("pack_cuda.cu", "launch.divisor != 1.0", "false", PACK),
    "sums divide before they add": ("pack_cuda.cu", "sum[lane] + x.get(lane);", "sum[lane] + x.get(lane) / 1.0000001F;", PACK),
    "more ranks than there can be": ("pack_cuda.cu", "launch.world > ReduceLaunch::kMaxWorld", "false", PACK),
}  # fmt: skip


class Builder:
    """Compiles the tests once, and for each mutant the kernels that have its line."""

    def __init__(self, work: Path) -> None:
        self.work = work
        recipe = toolchain.read_recipe(ROOT / "csrc")
        self.cxx = [*toolchain.find_toolchain().cxx, *recipe.flags, *FLAGS]
        self.host = [(ROOT / "csrc" / source.path, source.flags) for source in recipe.sources]
        self.host = [part for part in self.host if part[0].parent.name in ("base", "device", "kernels")]
        self.host.append((NATIVE / "fake_cuda" / "fibers.cpp", ()))
        tests: list[tuple[Path, tuple[str, ...]]] = [(NATIVE / f"{test}.cpp", ()) for test in TESTS]
        kernels = [(path, ("-x", "c++")) for path in sorted((ROOT / "csrc" / "kernels").glob("*_cuda.cu"))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [*tests, *kernels, *self.host]
            list(pool.map(lambda job: self.compile(job[0], job[1], ROOT / "csrc", work), jobs))

    def compile(self, source: Path, flags: tuple[str, ...], csrc: Path, to: Path) -> None:
        include = [f"-I{csrc}", f"-I{NATIVE}", f"-I{NATIVE / 'fake_cuda'}"]
        self._run([*self.cxx, *include, *flags, "-c", str(source), "-o", str(to / f"{source.stem}.o")])

    def fate(self, name: str) -> str:
        """Empty if the mutant is killed."""
        path, text, replacement, test = MUTANTS[name]
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            own = Path(folder)
            shutil.copytree(ROOT / "csrc", own / "csrc")
            file = own / "csrc" / "kernels" / path
            original = file.read_text()
            if original.count(text) != 1:
                return f"{path} has {original.count(text)} lines like this, not one"
            file.write_text(original.replace(text, replacement))
            try:
                for kernel in kernels_of(test):
                    if path.endswith(".h") or kernel == path:
                        self.compile(own / "csrc" / "kernels" / kernel, ("-x", "c++"), own / "csrc", own)
            except subprocess.CalledProcessError:
                return "does not compile"
            return "" if self.fails(test, own) else "SURVIVES"

    def fails(self, test: str, own: Path) -> bool:
        """With the kernels compiled in ``own``, and those of the sources as they are where it has none."""
        kernels = [Path(kernel).stem + ".o" for kernel in kernels_of(test)]
        objects = [own / name if (own / name).exists() else self.work / name for name in kernels]
        objects += [self.work / f"{path.stem}.o" for path in [Path(test), *(part[0] for part in self.host)]]
        program = own / f"run_{test}"
        self._run([*self.cxx, *map(str, objects), "-o", str(program)])
        env = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1:detect_leaks=0"}
        try:
            done = subprocess.run([program], env=env, capture_output=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0

    def _run(self, command: list[str]) -> None:
        subprocess.run(command, check=True, timeout=600)


def kernels_of(test: str) -> list[str]:
    found = re.search(r"^// needs: (.*)$", (NATIVE / f"{test}.cpp").read_text(), re.MULTILINE)
    assert found, test
    names = [f"{name}.cu" for name in found.group(1).split()]
    return [name for name in names if (ROOT / "csrc" / "kernels" / name).is_file()]


def main() -> int:
    names = sys.argv[1:] or list(MUTANTS)
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(Path(folder))
        for test in TESTS:
            if builder.fails(test, builder.work):
                print(f"{test} fails without any mutation")
                return 1
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, problem in zip(names, pool.map(builder.fate, names), strict=True):
                if problem:
                    problems.append(f"{name}: {problem}")
                print(f"{problem or 'killed':9} {name}", flush=True)
    print("\n".join(problems) or f"{len(names)} mutants, all killed")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
