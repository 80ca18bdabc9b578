"""Read the Markdown pages of this repository: their code blocks, headings and links."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, TRANSLATED = ROOT / "README.md", ROOT / "README.zh-TW.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, TRANSLATED, *DOCS, ROOT / "CHANGELOG.md", *sorted((ROOT / "deploy").glob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(page: Path) -> list[tuple[str, str]]:
    """Return every code block of a page: its language and its text."""
    return FENCE.findall(page.read_text("utf-8"))


def blocks(page: Path, language: str, heading: str = "") -> list[str]:
    """Return the code blocks in a language, of the whole page or of the section with this heading."""
    text = page.read_text("utf-8")
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [block for kind, block in FENCE.findall(text) if kind == language]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in lower case, with dashes and without punctuation."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the links to files of this repository, or into pages, that lead nowhere."""
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", page.read_text("utf-8")))
    return [link for link in links if not _exists(page, link)]


def _exists(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))
