"""What the pages say is so: their code runs, their numbers are computed, their links and errors exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
