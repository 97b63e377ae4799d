"""The documentation runs: every python block of a page, in order, in one namespace, and every relative link."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eachgrad.rules import BROADCAST, COMPOSITES, RULES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A fenced block with its language, e.g. "python", "python no-run" or "text".
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
NUMBER = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Rules that a page registers, and the random state, are gone after it."""
    tables = [(table, table.copy()) for table in (RULES, COMPOSITES, BROADCAST)]
    with torch.random.fork_rng(devices=[]):
        yield
    for table, before in tables:
        table.clear()
        table.update(before)


def words(text: str) -> str:
    """The text without its numbers, which depend on the machine, and without its spacing."""
    return " ".join(NUMBER.sub("#", text).split())


def run(source: str, page: Path, line: int, namespace: dict[str, object]) -> str:
    """What a block prints; errors point at the page's own lines."""
    printed = io.StringIO()
    code = compile("\n" * line + source, page.name, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run_and_print_what_the_page_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch.compile looks functions' modules up
    namespace = vars(module)
    printed = None  # of the python block right before
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start("body"))
        if block["kind"] == "python":
            printed = run(block["body"], page, line, namespace)
        elif block["kind"] == "text":
            assert printed is not None, f"{page.name}:{line}: output of no block"
            assert words(printed) == words(block["body"]), f"{page.name}:{line}: it prints\n{printed}"
            printed = None
        else:
            assert block["kind"] == "python no-run", f"{page.name}:{line}: fenced as {block['kind']!r}"


def slug(heading: str) -> str:
    """The anchor that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [t for t in LINK.findall(text) if not re.match(r"\w+:", t)]
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}, and there is no such heading"
