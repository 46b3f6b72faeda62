"""The main job, tiny, started as a user starts it."""

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.support.example_runs import EXAMPLES, run_example
from tests.support.requirements import slow_case

TINY = (
    "--layers 2 --width 32 --heads 2 --context 32 --batch 4 --steps 24 --lr 3e-3 --warmup 2 --evaluate-every 8 "
    "--evaluate-batches 2 --text-bytes 300000"
).split()


COLUMNS = ("params", "grads", "states", "buffers", "rest", "peak", "tokens/s", "step, ms", "first loss", "last loss")
LABELS = {"ddp": "DDP", "zero": "ZeroRedundancyOptimizer", "fsdp2": "FSDP2"}
OURS = ("bw.ShardedAdamW", "bw.shard")


def launch(directory: Path, ranks: int, *flags: str) -> tuple[int, str]:
    """Exit code and output of the example, tiny."""
    return run_example("train_gpt.py", ranks, *TINY, *flags, directory=directory)


def row_of(output: str, system: str) -> dict[str, float]:
    """The numbers of a system's row by column, but for those that it has not."""
    row = re.search(rf"^{re.escape(system)} +(?:-|ZeRO-\d) +(.+)$", output, re.MULTILINE)
    assert row is not None, f"no row {system!r} in:\n{output}"
    cells = dict(zip(COLUMNS, row[1].split(), strict=True))
    return {name: float(cell.replace(",", "")) for name, cell in cells.items() if cell != "-"}


def check_row(row: dict[str, float]) -> None:
    assert row["tokens/s"] > 0 and row["step, ms"] > 0 and row["last loss"] < row["first loss"], row
    assert row["params"] > 0 and row["grads"] > 0 and row["states"] > 0, row
    if "peak" in row:
        assert abs(row["peak"] - sum(row.get(name, 0) for name in COLUMNS[:5])) < 0.04 and row["rest"] > 0, row


@pytest.mark.parametrize(
    ("ranks", "peers"), [(2, "ddp"), slow_case(2, "ddp,zero,fsdp2"), slow_case(0, "ddp,zero,fsdp2")]
)
def test_training_agrees_with_the_peers_and_draws_them(tmp_path, ranks, peers):
    resume = ("--save", "checkpoint", "--every", "6", "--check-resume")
    flags = ("--zero3", "--compare", peers, "--plot", "pictures", *resume)
    code, output = launch(tmp_path, ranks, *flags)
    assert code == 0 and "the same bits" in output, output
    systems = [*peers.split(","), *OURS]
    rows = {name: row_of(output, LABELS.get(name, name)) for name in systems}
    for row in rows.values():
        check_row(row)
    differences = re.findall(r"(\S+): largest relative difference of a training loss from (\S+): (\S+)", output)
    pairs = [(name, "ddp") for name in systems[1:]] + [(OURS[1], OURS[0])]
    assert [pair for *pair, _ in differences] == [[*pair] for pair in pairs], output
    assert all(float(difference) <= 1e-5 for *_, difference in differences), output
    assert float(differences[-1][2]) == 0, output  # sharded and whole parameters
    for picture in ("demo.png", "memory_by_ranks.png"):
        assert (tmp_path / "pictures" / picture).read_bytes().startswith(b"\x89PNG")
    points = json.loads((tmp_path / "pictures" / "demo.json").read_text())["bytes_per_parameter"]
    assert points == pytest.approx({name: row["peak"] for name, row in rows.items()}, abs=0.006)
    share = 1 / max(ranks, 1)
    sharded = {"params": ["fsdp2", "bw.shard"], "grads": ["fsdp2", *OURS], "states": ["fsdp2", "zero", *OURS]}
    for part, names in sharded.items():
        for name, row in rows.items():
            whole = rows["ddp"][part]
            assert row[part] <= 1.1 * whole * (share if name in names else 1), output
    assert "\r" not in output and "step 8: ddp loss" in output, output  # stderr is no terminal


@pytest.fixture(name="formula")
def imported_formula(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("memory_formula")


def test_the_formula_sums_what_each_system_shards(formula):
    sizes = formula.Sizes(parameters=1000, block=200, root=100)  # 4 blocks and the rest
    bucket = 1000  # bytes

    def parts(system: str, ranks: int) -> list[float]:
        return [*formula.bytes_per_parameter(system, ranks, sizes, bucket_bytes=bucket).values()]

    assert all(parts(system, 1) == [4, 4, 8, 0] for system in formula.SYSTEMS)
    assert parts("ddp", 8) == [4, 4, 8, 0]
    assert formula.bytes_per_parameter("ddp", 8, sizes, bucket_view=False)["buffers"] == 4
    assert parts("zero", 8) == [4, 4, 1, 0]
    assert parts("fsdp2", 8) == pytest.approx([0.5, 0.5, 1, 3.2 + 0.4])
    assert parts("bw.ShardedAdamW", 8) == pytest.approx([4, 0.5, 1, 2.0])
    assert parts("bw.shard", 8) == pytest.approx([0.5, 0.5, 1, 3.2 + 0.8])
    with pytest.raises(ValueError, match="system 'other' on 2 ranks"):
        parts("other", 2)
    with pytest.raises(ValueError, match="on 0 ranks"):
        parts("ddp", 0)


@pytest.mark.slow
def test_bf16_parameters_train(tmp_path):
    code, output = launch(tmp_path, 2, "--dtype", "bf16")
    assert code == 0, output
    check_row(row_of(output, "bw.ShardedAdamW"))
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_an_error(tmp_path):
    code, output = launch(tmp_path, 0, "--lr", "0")
    assert code == 1, output
    assert "FAILED: the validation loss of bw.ShardedAdamW did not fall" in output
