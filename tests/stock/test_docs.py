"""What the pages say is so: their code runs, their numbers are computed, their links and errors exist."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(page: str, title: str) -> str:
    return (ROOT / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def run_block(page: str, title: str) -> dict[str, Any]:
    """The names that the Python of a section defines."""
    (block,) = re.findall(r"^```python\n(.*?)^```", section(page, title), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, f"{page}: {title}", "exec"), names)
    return names


def test_the_memory_of_a_7b_model_is_computed() -> None:
    title = "7 billion parameters on 8 GPUs"
    rows = run_block("docs/memory.md", title)["rows"]
    for name, parts in rows.items():
        cells = " | ".join(f"{nbytes / 1e9:.1f}" for nbytes in (*parts, sum(parts)))
        assert f"| {name} | {cells} |\n" in section("docs/memory.md", title)


def test_twenty_lines_learn(capsys: pytest.CaptureFixture[str]) -> None:
    run_block("README.md", "Twenty lines")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 10 and losses[-1] < 0.5 * losses[0], losses


def anchor(heading: str) -> str:
    """GitHub's."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())):
            if not target.startswith("http"):
                found = (page.parent / target).resolve() if target else page
                assert found.exists(), f"{page.name}: {target}"
                headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M) if heading else []
                assert not heading or heading in map(anchor, headings), f"{page.name}: {target}#{heading}"


def sources() -> str:
    """All of Python and C++, its adjacent string literals joined."""
    files = [path for folder in ("python/bucketwheel", "csrc") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".h", ".cpp", ".cu")]
    return re.sub(r'"\s*\n\s*(?:<< )?[rf]*"', "", "\n".join(texts))


def test_the_errors_of_the_troubleshooting_page_exist() -> None:
    text = sources()
    fragments = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(fragments) > 20
    unknown = [heading for heading in fragments if not all(part in text for part in heading.split(" ... "))]
    assert not unknown, "messages have changed: " + "; ".join(unknown)


# --- the script of docs/ddp.md, beside what it was --------------------------------------------------------------------


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model


def batches(rank: int, step: int) -> Tensor:
    return torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def train_with_ddp(rank: int, steps: range) -> tuple[list[float], nn.Module]:
    torch.manual_seed(rank)
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    losses = []
    for step in steps:
        for i, batch in enumerate(batches(rank, step)):
            with ddp.no_sync() if i < 2 else contextlib.nullcontext():
                loss = loss_of(ddp(batch)) / 3
                loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    return losses, ema


def convert(rank: int, world: int, folder: Path) -> None:
    train = run_block("docs/ddp.md", "A script")["train"]
    before, _ = train(make_model, batches, loss_of, range(6), folder)
    after, ema = train(make_model, batches, loss_of, range(6, 12), folder, resume=True)
    expected, expected_ema = train_with_ddp(rank, range(12))
    torch.testing.assert_close(torch.tensor(before + after), torch.tensor(expected), rtol=1e-5, atol=0)
    data = batches(0, 99)[0]
    torch.testing.assert_close(ema.eval()(data), expected_ema.eval()(data), rtol=1e-5, atol=1e-6)
    assert dist.get_world_size() == world


@pytest.mark.parametrize("world", [1, 2])
def test_the_converted_script_has_ddps_losses(rank_pool: Any, world: int, tmp_path: Path) -> None:
    rank_pool(world).run(convert, tmp_path, timeout_s=60)
