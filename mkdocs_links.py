"""Links of the site: a file of the repository in backticks leads to its source, a page that a docstring names to that page."""

import re
from typing import Any

_FILE = re.compile(
    r"(?<!\[)`((?:(?:examples|benchmarks|tests|csrc|\.github)/[\w/.-]+\.\w+)|CHANGELOG\.md|SECURITY\.md)`(?!\])"
)
_PAGE = re.compile(r"\bdocs/([\w/]+)\.md")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    return _FILE.sub(rf"[`\1`]({config.repo_url.rstrip('/')}/blob/main/\1)", markdown)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    if not page.file.src_uri.startswith("api/"):
        return html
    return _PAGE.sub(r'<a href="../../\1/">\1</a>', html)
