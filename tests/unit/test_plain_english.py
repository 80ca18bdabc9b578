"""Keeps the worst words out of messages, descriptions and docstrings, and out of the texts of SQL errors.

In webhookd/ it checks every string constant that has a space: docstrings, log messages, help texts, errors,
metric and OpenAPI texts. In schema/ it checks every string literal that has a space: error messages.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORST_WORDS = re.compile(
    r"""\b(
        anew | begun | amid | whoever | whosoever
        | (?<!postgres\ or\ )nobody(?:'s)?  # but the system's user nobody
        | somebody(?:'s)? | everybody(?:'s)?
        | anybody(?:'s)? | in\ vain | (?:is|are|was|were|be)\ told | (?:asks|asked)\ (?:nobody|anew|again)
        | who\ (?:is|are|was|were|has|have|had|may|might|can|could|does|did|do|asks|asked|waits|comes|came
            |gets|got|wants|needs|holds|sends|reads|knows|cannot|else)
        | hungry | bells? | ears? | shadows? | buried | crowded | for\ want\ of
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_SQL_COMMENT = re.compile(r"--[^\n]*")
_SQL_LITERAL = re.compile(r"'((?:[^'\n]|'')*)'")


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield every string constant that has a space, line by line, with its line number."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line


def sql_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield every string literal that has a space, with its line number."""
    for number, line in enumerate(source.split("\n"), 1):
        for literal in _SQL_LITERAL.findall(_SQL_COMMENT.sub("", line)):
            if " " in literal:
                yield number, literal


def complaints(path: Path) -> Iterator[str]:
    """Yield a line for each text of a file that has one of the words."""
    source = path.read_text("utf-8")
    texts = python_texts(source) if path.suffix == ".py" else sql_texts(source)
    for line, text in sorted(texts):
        for found in WORST_WORDS.finditer(text):
            yield f"{path.relative_to(ROOT)}:{line}: avoid {found[0]!r}: {text.strip()[:100]}"


def test_texts_are_plain_english() -> None:
    """Each complaint names the file, the line and the word. STYLE, chapter "Plain English", has the rules."""
    files = [*sorted((ROOT / "webhookd").rglob("*.py")), *sorted((ROOT / "schema").rglob("*.sql"))]
    assert files
    found = [complaint for path in files for complaint in complaints(path)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("source", "suffix", "lines"),
    [
        ('"""Asks nobody."""\nlog.info("%s failed and is begun anew", name)\n', ".py", [1, 2, 2]),
        ('x = "anew"  # one word may be an identifier\n', ".py", []),
        ('raise Error(f"{name} is told so")\n"""One.\n\nTwo, in vain."""\n', ".py", [1, 4]),
        ("perform require(a, 'somebody else''s key'); -- nobody 'reads it'\n", ".sql", [1]),
        (
            '"""The year is near: who reads this hears no bell, nor begunia, nor a shadowed name."""\n',
            ".py",
            [1, 1],
        ),
    ],
)
def test_words_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, suffix: str, lines: list[int]
) -> None:
    """Whole words only, in every kind of text, with the right line."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / f"sample{suffix}"
    path.write_text(source)
    assert [int(complaint.split(":")[1]) for complaint in complaints(path)] == lines
