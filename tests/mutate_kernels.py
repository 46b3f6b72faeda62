"""Does the suite notice a broken kernel? Breaks one line at a time in a copy of csrc and runs the kernel tests on it.

    python tests/mutate_kernels.py [NAME ...]

Every mutant must be killed: the exit status is the number of survivors (or of mutations whose line is no longer there).
A kernel test that only looks at parameters with a tolerance above lr would let most of these live. Takes some minutes:
each mutant compiles the kernels again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from bucketwheel.native import toolchain as _toolchain  # noqa: E402

UNIT = "tests/unit/"
ADAM = [UNIT + "test_adam.py", UNIT + "test_adam_table.py", UNIT + "test_adam_matrix.py"]
NORM = [UNIT + "test_norm.py"]
PACK = [UNIT + "test_pack.py"]
MATRIX = [UNIT + "test_adam_matrix.py"]
CODECS = [UNIT + "test_float16.py"]
THREADS = [UNIT + "test_threads.py"]

# name: (file below csrc/, text, replacement, tests that must fail)
MUTANTS = {
    "no bias correction of m": ("kernels/adam_math.h", "-(group.lr / bias_correction1)", "-(group.lr)", ADAM),
    "no bias correction of v": ("kernels/adam_math.h", "__builtin_sqrt(bias_correction2)", "1.0", ADAM),
    "beta1 for beta2": ("kernels/adam_math.h", "pow_int(group.beta2, step)", "pow_int(group.beta1, step)", ADAM),
    "1 - beta2 in float": ("kernels/adam_math.h", "out.one_minus_b2 = 1.0 - group.beta2;", "out.one_minus_b2 = 1.0F - static_cast<float>(group.beta2);", ADAM),
    "step off by one": ("kernels/adam_math.h", "pow_int(group.beta1, step)", "pow_int(group.beta1, step + 1)", ADAM),
    "power loses its last bit": ("kernels/adam_math.h", "for (; n > 0; n >>= 1)", "for (; n > 1; n >>= 1)", ADAM),
    "maximize ignored": ("kernels/adam_math.h", "maximize ? -gscale : gscale", "gscale", ADAM),
    "gradient factor ignored": ("kernels/adam_math.h", "g = g * s.gscale;", "", ADAM),
    "gradient factor applied to m only": ("kernels/adam_math.h", "s.one_minus_b2 * g, g, v", "s.one_minus_b2 * g, g / s.gscale, v", ADAM),
    "no weight decay": ("kernels/adam_math.h", "p = p * s.decay;", "", ADAM),
    "weight decay after the update": ("kernels/adam_math.h", "return p + (s.neg_step * m) / den;", "return (p / s.decay + (s.neg_step * m) / den) * s.decay;", ADAM),
    "eps inside the square root": ("kernels/adam_math.h", "quotient(square_root(v), s.bc2_sqrt, s.inv_bc2_sqrt) + s.eps", "quotient(square_root(v + s.eps), s.bc2_sqrt, s.inv_bc2_sqrt)", ADAM),
    "m without fma": ("kernels/adam_math.h", "m = fused_multiply_add(s.one_minus_b1, g - m, m);", "m = s.one_minus_b1 * (g - m) + m;", ADAM),
    "v without fma": ("kernels/adam_math.h", "fused_multiply_add(s.one_minus_b2 * g, g, v * s.b2)", "s.one_minus_b2 * g * g + v * s.b2", ADAM),
    "v from the old gradient": ("kernels/adam_math.h", "s.one_minus_b2 * g, g, v", "s.one_minus_b2 * m, m, v", ADAM),
    "Adam skips the tail": ("kernels/adam_cpu.h", "adam_range<Kind>(at.from(i), n - i, s, random);", "", ADAM),
    "Adam skips the last element": ("kernels/adam_cpu.h", "adam_range<Kind>(at.from(i), n - i, s, random);", "adam_range<Kind>(at.from(i), n - i > 0 ? n - i - 1 : 0, s, random);", ADAM),
    "chunks one too short": ("kernels/segment_table.h", "numel % chunk_numel_ != 0 ? 1 : 0", "numel % chunk_numel_ > 1 ? 1 : 0", ADAM),
    "an empty row takes a chunk": ("kernels/segment_table.h", "std::upper_bound(", "std::lower_bound(", ADAM),
    "the chunk walk stops at empty rows": ("kernels/segment_table.h", "while (chunk.begin == numel(chunk.row))", "if (chunk.begin == numel(chunk.row))", ADAM),
    "unused rows are stepped": ("kernels/adam.cpp", "if (step.used.empty() || step.used[r] != 0)", "", ADAM),
    "noop ignored": ("kernels/adam.cpp", "step.noop != nullptr && *step.noop != 0.0F", "false", ADAM),
    "all rows take the first one's scalars": ("kernels/adam.cpp", "rows_[r].group == last_group && step.steps[r] == last_step && gscale == last_gscale", "true", ADAM),
    "scalars kept across groups": ("kernels/adam.cpp", "rows_[r].group == last_group && ", "", ADAM),
    "scalars kept across steps": ("kernels/adam.cpp", "step.steps[r] == last_step && ", "", ADAM),
    "scalars kept across factors": ("kernels/adam.cpp", " && gscale == last_gscale", "", ADAM),
    "row range ignored": ("kernels/adam.cpp", "segments_.first_chunk(step.last_row) - first_chunk", "segments_.chunks() - first_chunk", ADAM),
    "bfloat16 truncated": ("kernels/float16.h", "bits + 0x7fffu + ((bits >> 16) & 1u)", "bits", [*PACK, *ADAM]),
    "bfloat16 ties away from even": ("kernels/float16.h", "0x7fffu + ((bits >> 16) & 1u)", "0x8000u", PACK),
    "bfloat16 NaN becomes infinity": ("kernels/float16.h", "value != value ? 0x7fc00000u : rounded", "rounded", PACK),
    "bfloat16 parameter not rounded from its master": ("kernels/adam_cpu.h", "put(p[i], weight);", "put(p[i], kWeight == AdamWeight::kMaster ? widened(p[i]) + (weight - master[i]) : weight);", ADAM),
    "float16 NaN as the processor has it, AVX-512": ("kernels/convert_cpu.h", "_mm256_mask_set1_epi16(halves, is_nan, 0x7e00)", "halves", [*CODECS, *PACK]),
    "float16 rounded towards zero, AVX-512": ("kernels/convert_cpu.h", "_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)", "_mm512_cvtps_ph(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)", [*CODECS, *PACK]),
    "the tail of float16 stays": ("kernels/convert_cpu.h", "  for (; i < n; ++i) {\n    put(to[i], from[i]);\n  }", "", [*CODECS, *PACK]),
    "no loop on torch's threads": ("base/thread_pool.cpp", "if (!openmp.has_team())", "if (openmp.has_team() || true)", THREADS),
    "a team that the fork took": ("base/thread_pool.cpp", "!was_forked && fork_generation() == 0", "true", THREADS),
    "a team that a fork before took": ("base/thread_pool.cpp", "was_forked(fork_generation() != 0 || is_forked_without_exec())", "was_forked(false)", THREADS),
    "denormals depend on the thread": ("base/thread_pool.cpp", "IeeeFloats ieee;", "", [*ADAM, *NORM]),
    "norm accumulates in float": ("kernels/norm_cpu.h", "return __builtin_fma(value, value, sum);", "return static_cast<float>(sum) + static_cast<float>(value * value);", NORM),
    "norm forgets a row of lanes": ("kernels/norm_cpu.h", "i + kGroup <= n", "i + kGroup < n", []),
    "lanes shift by one": ("kernels/norm_cpu.h", "add_rows<1>(source, 0, head, lanes + lane);", "add_rows<1>(source, 0, head, lanes + lane - 1);", NORM),
    "folding skips the last lanes": ("kernels/norm.cpp", "begin < used; begin += kWarpLanes", "begin + kWarpLanes <= used; begin += kWarpLanes", NORM),
    "folding in another order": ("kernels/norm.cpp", "fours[t] += fours[t + half];", "fours[t] += fours[2 * half - 1 - t];", NORM),
    "infinity not seen": ("kernels/norm.cpp", "return {sum, !is_finite(sum)};", "return {sum, sum != sum};", NORM),
    "shard sums keep the last pass": ("kernels/norm.cpp", "  sum_ = Fold();\n  in_chunk_ = 0;\n}\n\nvoid SumsqAccumulator::close", "  in_chunk_ = 0;\n}\n\nvoid SumsqAccumulator::close", NORM),
    "shard overwrites instead of adding": ("kernels/norm.cpp", "add_ = add;", "add_ = false && add;", NORM),
    "padding is not stored": ("kernels/norm.cpp", "cpu_kernels().store(to, dtype_, from, stop - position_, add_);", "", NORM),
    "padding is summed": ("kernels/norm.cpp", "is_last || position_ < segments_[segment_].begin", "is_last", NORM),
    "sum skips a rank": ("kernels/reduce_cpu.h", "for (int rank = 1; rank < world; ++rank)", "for (int rank = 1; rank < world - 1; ++rank)", PACK),
    "sum rounds at every rank": ("kernels/reduce_cpu.h", "sum += widened(c[i]);", "sum = widen_bf16(round_to_bf16(sum)) + widened(c[i]);", PACK),
    "corrected quotient without its correction": ("kernels/adam_math.h", "remainder == remainder ? corrected : guess", "guess", ADAM),
    "an infinite quotient is corrected": ("kernels/adam_math.h", "remainder == remainder ? corrected : guess", "corrected", ADAM),
    "amsgrad takes this step's v": ("kernels/adam_math.h", "vmax != nullptr ? *vmax : v, s, decoupled", "v, s, decoupled", MATRIX),
    "amsgrad drops a NaN": ("kernels/adam_math.h", "v > *vmax || v != v ? v : *vmax", "v > *vmax ? v : *vmax", MATRIX),
    "reused random bits: every step": ("kernels/adam.cpp", "step.steps[r],", "1,", MATRIX),
    "reused random bits: parameter for v": ("kernels/philox.h", "param * 4u + static_cast<uint32_t>(use)", "param * 4u", MATRIX),
    "reused random bits: every 2^32 blocks": ("kernels/random_cpu.h", "c1[chain] = c0[chain] >> 32;", "c1[chain] = RandomLanes{};", MATRIX),
    "random bits by the place in the row": ("kernels/adam_cpu.h", "const int64_t element = row.param_begin + i;", "const int64_t element = i;", MATRIX),
    "random bits of pairs by the place in the row": ("kernels/adam_pairs_cpu.h", "(row.param_begin + i) / kRandomBlockNumel", "i / kRandomBlockNumel", MATRIX),
    "one Philox round less": ("kernels/philox.h", "kPhiloxRounds = 7", "kPhiloxRounds = 6", MATRIX),
    "Philox key does not move": ("kernels/random_cpu.h", "key.next();", "", MATRIX),
    "stochastic rounding truncates": ("kernels/float16.h", "bits + random;", "bits + (random & 0u);", MATRIX),
    "stochastic rounding is always up": ("kernels/float16.h", "bits + random;", "bits + 0xffffu;", MATRIX),
    "m rounded stochastically in pairs": ("kernels/adam_pairs_cpu.h", "rounded_pair<false>(m0, m1, 0)", "rounded_pair<Kind::kRandomV>(m0, m1, Kind::kRandomV ? run.random_v[i] : 0)", MATRIX),
    "pairs exchanged": ("kernels/adam_pairs_cpu.h", "(first_bits >> 16) | (second_bits & 0xffff0000u)", "(second_bits >> 16) | (first_bits & 0xffff0000u)", MATRIX),
    "pairs skip the odd last element": ("kernels/adam_cpu.h", "if (head + even < pass.numel)", "if (false)", MATRIX),
    "pairs skip the weights of the last run": ("kernels/adam_pairs_cpu.h", "i < n || before > 0;", "i < n;", MATRIX),
    "nearest v rounded stochastically": ("kernels/adam_cpu.h", "if (pass.stochastic) {\n      store_stochastic", "if (true) {\n      store_stochastic", MATRIX),
    "nearest v rounded stochastically in a loop": ("kernels/adam_cpu.h", "if (pass.stochastic) {\n      const int64_t head", "if (true) {\n      const int64_t head", MATRIX),
    "random bits of a loop by the place in the row": ("kernels/adam_cpu.h", "(row.param_begin + begin + i) / kRandomBlockNumel", "(begin + i) / kRandomBlockNumel", MATRIX),
    "a loop steps its head again": ("kernels/adam_cpu.h", "(row, pass, pass.begin + head, s);", "(row, pass, pass.begin, s);", MATRIX),
    "remainder not stored by a loop": ("kernels/adam_cpu.h", "      master[i] = split.low;\n", "", MATRIX),
    "vmax not stored": ("kernels/adam_cpu.h", "narrow(vmax, row.state_dtype, vmax_floats, n);", "", MATRIX),
    "remainder loses its carry": ("kernels/float16.h", "(bits >> 16) + ((bits >> 15) & 1u)", "bits >> 16", [*CODECS, *MATRIX]),
    "decoding ignores the carry": ("kernels/float16.h", "split.high - (low >> 15)", "split.high", [*CODECS, *MATRIX]),
    "the split master hides NaNs": ("kernels/float16.h", "const uint32_t bits = is_nan_bits(raw) ? 0x7fc00000u : raw;", "const uint32_t bits = raw;", CODECS),
    "float16 ties away from even": ("kernels/float16.h", "magnitude + 0xfffu + ((magnitude >> 13) & 1u)", "magnitude + 0x1000u", PACK),
    "float16 denormals flushed": ("kernels/float16.h", "magnitude < 0x38800000u ? denormal : normal", "magnitude < 0x38800000u ? 0u : normal", PACK),
    "float16 denormals widen wrongly": ("kernels/float16.h", "magnitude < 0x00800000u ? denormal : normal", "normal", PACK),
    "float64 squares fused": ("kernels/norm_cpu.h", "BW_HD double add_square(double sum, double value) { return sum + value * value; }", "BW_HD double add_square(double sum, double value) { return __builtin_fma(value, value, sum); }", NORM),
    "float64 summed in float": ("kernels/reduce_cpu.h", "sum_typed<double, double>(to, from, world, n);", "for (int64_t i = 0; i < n; ++i) { float s = 0; for (int r = 0; r < world; ++r) { s += static_cast<const double*>(from[r])[i]; } static_cast<double*>(to)[i] = s; }", PACK),
    "groups of 32 chunks": ("kernels/norm_fold.h", "kFoldGroup = 64", "kFoldGroup = 32", NORM),
    "streamed chunks in one group": ("kernels/norm_fold.h", "if (++in_group_ == kFoldGroup) {", "if (++in_group_ < 0) {", NORM),
    "copy ignores where its chunk begins": ("kernels/pack.cpp", "static_cast<const std::byte*>(item.from) + begin *", "static_cast<const std::byte*>(item.from) + 0 *", PACK),
}  # fmt: skip
# Changes nothing that can be seen: a check of this script itself.
EQUIVALENT = {"norm forgets a row of lanes"}

MODULE = """
#include "bindings/adam_py.h"
#include "bindings/device_py.h"
#include "bindings/error_py.h"
#include "bindings/norm_py.h"
#include "bindings/pack_py.h"
PYBIND11_MODULE(_cpu, m) {
  bucketwheel::bind_error(m);
  bucketwheel::bind_device(m);
  bucketwheel::bind_cuda(m);
  bucketwheel::bind_adam(m);
  bucketwheel::bind_norm(m);
  bucketwheel::bind_pack(m);
}
"""


class Builder:
    """Compiles base, device, kernels and their bindings; the bindings once, the rest again for each mutant that concerns it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.csrc = work / "csrc"
        shutil.copytree(ROOT / "csrc", self.csrc)
        toolchain = _toolchain.find_toolchain()
        recipe = _toolchain.read_recipe(self.csrc)
        includes = [word for folder in toolchain.includes for word in ("-isystem", folder)]
        self.cxx = [*toolchain.cxx, *recipe.flags, f"-I{self.csrc}", *includes, "-w"]
        self.sources = [s for s in recipe.sources if s.path.startswith(("base/", "device/", "kernels/"))]
        (work / "module.cpp").write_text(MODULE)
        self._run([*self.cxx, "-O1", "-c", str(work / "module.cpp"), "-o", str(work / "module.o")])
        self.isa = ""
        native = self.compile_all("")
        # From here on only the instruction set that the tests use is compiled again.
        show = f"import sys; sys.path.insert(0, {str(native)!r}); import _cpu; print(_cpu.cpu_isa())"
        done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=100)
        self.isa = done.stdout.strip()
        self.dirty: set[str] = set()

    def _is_stale(self, path: str, mutated: str) -> bool:
        if not mutated:
            return True
        if Path(path).stem in {"cpu_plain", "cpu_avx2", "cpu_avx512"} - {f"cpu_{self.isa}"}:
            return False
        changed = {mutated, *self.dirty}
        return path in changed or (path.startswith("kernels/") and any(name.endswith(".h") for name in changed))

    def compile_all(self, mutated: str) -> Path:
        """The module, after a change to `mutated` (a path below csrc/; "" for everything)."""

        def compile_one(source: _toolchain.Source) -> None:
            out = self.work / f"{Path(source.path).stem}.o"
            if self._is_stale(source.path, mutated):
                self._run([*self.cxx, *source.flags, "-c", str(self.csrc / source.path), "-o", str(out)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, self.sources))
        self.dirty = {mutated}
        out = self.work / "native"
        out.mkdir(exist_ok=True)
        objects = [str(self.work / f"{Path(s.path).stem}.o") for s in self.sources]
        self._run([*self.cxx, "-shared", *objects, str(self.work / "module.o"), "-o", str(out / "_cpu.so")])
        return out

    def _run(self, command: list[str]) -> None:
        subprocess.run(command, check=True, timeout=600)


def tests_fail(native: Path, tests: list[str]) -> bool:
    # the simulated device is not bound here
    chosen = ["-m", "not slow", "-k", "not simulated"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", *chosen, "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "BW_NATIVE_DIR": str(native)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode not in (0, 1):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode != 0


def main() -> int:
    names = sys.argv[1:] or list(MUTANTS)
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(Path(folder))
        if tests_fail(builder.work / "native", sorted({*ADAM, *NORM, *PACK})):
            print("the tests fail without any mutation")
            return 1
        for name in names:
            path, text, replacement, tests = MUTANTS[name]
            file = builder.csrc / path
            original = file.read_text()
            if text not in original:
                problems.append(f"{name}: {path} has no line like this any more")
                continue
            file.write_text(original.replace(text, replacement))
            killed = tests_fail(builder.compile_all(path), tests or [*ADAM, *NORM, *PACK])
            file.write_text(original)
            if killed == (name in EQUIVALENT):
                problems.append(f"{name}: {'killed, yet it changes nothing' if killed else 'SURVIVES'}")
            print(f"{'killed  ' if killed else 'survives'} {name}", flush=True)
    print("\n".join(problems) or f"{len(names)} mutants, each with the expected fate")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
