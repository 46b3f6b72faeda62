"""Do the tests notice a broken kernel, or a wait that is gone? Breaks one place at a time in a copy of the tree, and runs
tests on it.

    python tests/mutate_kernels.py [NAME ...]

Every mutant must be caught: the exit status is the number of survivors. A test that only looks at parameters with a
tolerance above lr would let most of these live. An hour for all: each mutant compiles the kernels again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def unit(*names: str) -> list[str]:
    return [f"tests/unit/test_{name}.py" for name in names]


def emulated(name: str) -> list[str]:
    return [f"tests/native/test_native.py::test_native[test_{name}_cuda-address]"]


STREAMS = ["tests/conformance/optimizer/test_optim_streams.py"]
RACES = ["tests/native/test_native.py::test_native[test_races-plain]"]


# Of each file in csrc/, the tests that must fail, and of each mutant its name, the text and the replacement.
MUTANTS: list[tuple[str, list[str], list[tuple[str, str, str]]]] = [
    ("adam_math.h", unit("adam", "adam_table", "adam_matrix"), [
        ("no bias correction of m", "-(group.lr / bias_correction1)", "-(group.lr)"),
        ("1 - beta2 in float", "out.one_minus_b2 = 1.0 - group.beta2;", "out.one_minus_b2 = 1.0F - static_cast<float>(group.beta2);"),
        ("weight decay after the update", "return p + (s.neg_step * m) / den;", "return (p / s.decay + (s.neg_step * m) / den) * s.decay;"),
        ("m without fma", "m = fused_multiply_add(s.one_minus_b1, g - m, m);", "m = s.one_minus_b1 * (g - m) + m;"),
        ("amsgrad takes this step's v", "vmax != nullptr ? *vmax : v, s, decoupled", "v, s, decoupled"),
    ]),
    ("adam_cpu.h", unit("adam", "adam_table", "adam_matrix"), [
        ("the tail is skipped", "adam_range<Kind>(at.from(i), n - i, s, random);", ""),
        ("the parameter is not rounded from its master", "put(p[i], weight);", "put(p[i], kWeight == AdamWeight::kMaster ? widened(p[i]) + (weight - master[i]) : weight);"),
        ("what was written to a parameter is lost", "        follow_block(at.master + i, at.p + i, numel);\n", ""),
    ]),
    ("adam_pairs_cpu.h", unit("adam_matrix"), [
        ("random bits by the place in the row", "(row.param_begin + i) / kRandomBlockNumel", "i / kRandomBlockNumel"),
        ("the weights of the last run are skipped", "i < n || before > 0;", "i < n;"),
    ]),
    ("segment_table.h", unit("adam_table"), [
        ("chunks one too short", "numel % chunk_numel_ != 0 ? 1 : 0", "numel % chunk_numel_ > 1 ? 1 : 0"),
    ]),
    ("adam.cpp", unit("adam_table", "adam_matrix"), [
        ("unused rows are stepped", "if (step.used.empty() || step.used[r] != 0)", ""),
        ("scalars kept across groups", "rows_[r].group == last_group && ", ""),
        ("random bits of every step are one", "step.steps[r],", "1,"),
    ]),
    ("philox.h", unit("adam_matrix"), [
        ("one round less", "kPhiloxRounds = 7", "kPhiloxRounds = 6"),
    ]),
    ("float16.h", unit("float16", "pack", "adam_matrix"), [
        ("bfloat16 ties away from even", "0x7fffu + ((bits >> 16) & 1u)", "0x8000u"),
        ("a tie above an odd parameter is its own", "0x10000u - (param & 1u)", "0x10000u"),
        ("float16 denormals flushed", "magnitude < 0x38800000u ? denormal : normal", "magnitude < 0x38800000u ? 0u : normal"),
    ]),
    ("norm_cpu.h", unit("norm"), [
        ("accumulated in float", "return __builtin_fma(value, value, sum);", "return static_cast<float>(sum) + static_cast<float>(value * value);"),
        ("lanes shift by one", "add_rows<1>(source, 0, head, lanes + lane);", "add_rows<1>(source, 0, head, lanes + lane - 1);"),
    ]),
    ("norm.cpp", unit("norm"), [
        ("folded in another order", "fours[t] += fours[t + half];", "fours[t] += fours[2 * half - 1 - t];"),
        ("padding is summed", "is_last || position_ < segments_[segment_].begin", "is_last"),
    ]),
    ("norm_fold.h", unit("norm"), [("groups of 32 chunks", "kFoldGroup = 64", "kFoldGroup = 32")]),
    ("reduce_cpu.h", unit("pack"), [
        ("a rank is skipped", "for (int rank = 1; rank < world; ++rank)", "for (int rank = 1; rank < world - 1; ++rank)"),
        ("rounded at every rank", "sum += widened(c[i]);", "sum = widen_bf16(round_to_bf16(sum)) + widened(c[i]);"),
    ]),
    ("pack.cpp", unit("pack"), [
        ("every chunk is the first", "static_cast<const std::byte*>(item.from) + begin *", "static_cast<const std::byte*>(item.from) + 0 *"),
        ("an addition of nothing zeroes", "item.add ? 0 : bytes", "bytes"),
    ]),
    ("adam_cuda.cu", emulated("adam"), [
        ("a block takes one chunk only", "chunk < first + launch.chunks; chunk += gridDim.x", "chunk < first + gridDim.x; chunk += gridDim.x"),
        ("the last vector goes beyond the row", "static_cast<int>((end - body) / K::kLanes);", "static_cast<int>((end - body + K::kLanes - 1) / K::kLanes);"),
        ("offsets of 32 bits", "const int64_t i = body + step * K::kLanes;", "const int64_t i = static_cast<uint32_t>(body) + step * K::kLanes;"),
        ("random bits by the place in the row", "lanes.run(common, row.param_begin + i);", "lanes.run(common, i);"),
        ("what was written to a parameter is lost", "resync ? followed<K::kP>(master.get(i), p.bits16(i)) : ", ""),
    ]),
    ("lanes_cuda.h", emulated("adam"), [
        ("halves of a word are swapped", "word[i / 2] >> (i % 2 * 16)", "word[i / 2] >> ((i + 1) % 2 * 16)"),
    ]),
    ("adam_scalars_cuda.cu", emulated("adam_scalars"), [
        ("no barrier after counting steps", "__syncthreads();", ""),
        ("a NaN is no noop", "*launch.noop != 0.0F", "(*launch.noop > 0.0F || *launch.noop < 0.0F)"),
    ]),
    ("norm_cuda.cu", emulated("norm"), [
        ("no barrier before warps are added", "  __syncthreads();\n  double total", "  double total"),
        ("no barrier between chunks", "    __syncthreads();  // `sums` is read; the next chunk writes it\n", ""),
        ("misaligned data read as vectors", "% (kSizeOf<kType> * kFour) == 0;", "% 4 == 0;"),
    ]),
    ("norm_fold_cuda.cu", emulated("norm"), [
        ("no more groups than threads", "first < groups; first += kBlockThreads", "first < 1; first += kBlockThreads"),
        ("no barrier between groups and their sum", "    sums[thread] = sum;\n    __syncthreads();", "    sums[thread] = sum;"),
        ("no barrier before factors are clipped", "  __syncthreads();\n  if (launch.clips ||", "  if (launch.clips ||"),
    ]),
    ("pack_cuda.cu", emulated("pack"), [
        ("the last chunk is missed", "chunk < launch.chunks; chunk += gridDim.x", "chunk < launch.chunks - 1; chunk += gridDim.x"),
        ("casts look at one side's alignment", "is_aligned_after<kSizeOf<kTo>, kLanes>(to, head) &&", "true &&"),
        ("sums forget the element before", "static_cast<RealOf<kTo>>(before + value)", "static_cast<RealOf<kTo>>(value)"),
        ("a number of elements is zeroed as bytes", "numel * static_cast<int>(size_of(item.to_dtype))", "numel"),
    ]),
    ("pool.cpp", RACES, [
        ("an acquire's stream does not wait", "      stream->wait(event);\n", ""),
        ("an acquire without a stream does not wait", "    } else {\n      event->synchronize();\n", "    } else {\n"),
        ("a fence is dropped before it is done", "if (fence.event->query()) {\n        dropped", "if (true) {\n        dropped"),
        ("poison is not behind the fences", "impl_->is_on_host() && events.empty() ? nullptr : stream.get();", "events.empty() ? stream.get() : nullptr;"),
        ("memory is trimmed before its last use", "        fence.event->synchronize();\n", "        (void)fence;\n"),
    ]),
    ("lease.cpp", RACES, [
        ("a release forgets its event", "    fences.push_back({offset_bytes, offset_bytes + block_bytes, std::move(after)});\n", ""),
        ("a dropped lease has no fence", "end_of_use(pool->is_on_host() ? nullptr : home)", "nullptr"),
        ("poison is written before the last use", "pool->options.poison && !has_fences", "pool->options.poison && (!has_fences || is_pending)"),
        ("a place forgets its event", "arena->give(*place, fences.empty() ? nullptr : fences.front().event, &before)", "arena->give(*place, nullptr, &before)"),
    ]),
    ("planned.cpp", RACES, [
        ("an arena goes before its last use", "    PoolImpl::leak_unless_done(slab, events, {});", ""),
    ]),
    ("arena.cpp", RACES, [
        ("the event of a place's first cell stands for all", "    if (event == nullptr || std::ranges::find", "    if (event == nullptr || i != place.first_cell || std::ranges::find"),
        ("an event counts as done before it is", "    if (!belongs_to_graph(*event) && event->query()) {\n      done", "    if (!belongs_to_graph(*event)) {\n      done"),
        ("the last cell keeps its event", "      cell.event = event;\n", "      cell.event = i + 1 == place.end_cell && i != place.first_cell ? nullptr : event;\n"),
    ]),
    ("free_list.cpp", RACES, [
        ("fences that are not done are forgotten", "return fence.event->query(); });", "return fence.end > 0; });"),
        ("a split loses the upper fences", "      rest->fences = split_fences(block->fences, rest->offset_bytes);", "      split_fences(block->fences, rest->offset_bytes);"),
        ("the fences of a joined block are lost", "    block->fences.insert(block->fences.end(), std::make_move_iterator(next->fences.begin()),\n                         std::make_move_iterator(next->fences.end()));\n", ""),
    ]),
    ("local_cuda.cpp", RACES, [
        ("an operation is not behind its callers", "    stream_->wait(one->ready);\n", ""),
    ]),
    ("window.cpp", STREAMS, [
        ("a write is not behind those of other streams", "      stream->wait(other->record());\n", "      (void)other;\n"),
        ("a place is entered before its last use", "      stream != nullptr ? stream->wait(event) : (void)event->synchronize();\n", "      (void)event;\n"),
        ("a launch is behind one of its streams", "      options.after.push_back(round.streams[i]->record());\n", "      (void)i;\n"),
        ("a launch is not behind the prepared shards", "      options.after.push_back(prepared_);\n", ""),
    ]),
    ("window.cpp", ["tests/conformance/optimizer/test_bucket_slots.py"], [
        ("a bucket is brought in before the last use of its place", "    stream->wait(event);\n  }\n  const CopyItem copy{", "    (void)event;\n  }\n  const CopyItem copy{"),
    ]),
    ("window.cpp", unit("arrivals"), [
        ("gradients are dropped before their pack", "      stream->run([owners = std::move(owners)] {});\n", ""),
    ]),
    ("reductions.cpp", STREAMS, [
        ("memory goes on before its operation", "places_.leave(one.memory, one.steps[0]->event());", "places_.leave(one.memory, nullptr);"),
        ("an operation of the replicas is not behind the one before", "      one.steps.back()->event()};", "      };"),
        ("a partial sum is not behind the last one there", "    after->insert(after->end(), events.begin(), events.end());\n", ""),
        ("a window ends before its operations", "        handle->wait(stream.get());\n", "        (void)handle;\n"),
    ]),
    ("reductions.cpp", ["tests/conformance/collectives/test_replicas.py"], [
        ("the groups take no turns", "reducers_.takes_turns && last_ != nullptr", "false"),
    ]),
]  # fmt: skip


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bw-mutants-") as folder:
        yield Path(
            shutil.copytree(ROOT, Path(folder, "tree"), ignore=shutil.ignore_patterns("__pycache__", "build", ".*"))
        )


def is_caught(tree: Path, tests: list[str], file: Path, mutant: str) -> bool:
    """Whether a test fails, or is not over after half an hour, with the text ``mutant`` in ``file``."""
    env = {**os.environ, "PYTHONPATH": f"{tree / 'python'}:{tree}", "BW_CACHE_DIR": str(tree / "cache")}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", "not every_float"]
    source = file.read_text()
    file.write_text(mutant)
    try:
        command = [sys.executable, "-m", "pytest", *options, *tests]
        return (
            subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=1800, check=False).returncode != 0
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(source)


def main() -> int:
    survivors = 0
    with copied_tree() as tree:
        for path, tests, mutants in MUTANTS:
            chosen = [mutant for mutant in mutants if not sys.argv[1:] or mutant[0] in sys.argv[1:]]
            (file,) = (tree / "csrc").rglob(path)
            source = file.read_text()
            if chosen and is_caught(tree, tests, file, source):
                sys.exit(f"the tests fail without a mutant: {' '.join(tests)}")
            for name, text, replacement in chosen:
                assert text in source, (path, name)
                fate = "caught" if is_caught(tree, tests, file, source.replace(text, replacement)) else "SURVIVES"
                survivors += fate == "SURVIVES"
                print(f"{fate:9}{path}: {name}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
