"""DNS as a test wants it, for a daemon in its own process; and what that daemon dialled.

Speaks with tests/support/site/sitecustomize.py through files in a folder.
"""

import json
import os
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"


class Names:
    """The names that exist; change them whenever you like."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table: dict[str, list[str] | None] = {}
        self._save()

    @property
    def environment(self) -> dict[str, str]:
        """For the daemon that is to believe in them."""
        path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), "TEST_NAMES_FOLDER": str(self._folder)}

    def answer(self, name: str, *addresses: str) -> None:
        """From the next lookup on."""
        self._table[name] = list(addresses)
        self._save()

    def stay_silent(self, *names: str) -> None:
        """Let lookups of these wait, until they have an answer."""
        self._table |= dict.fromkeys(names)
        self._save()

    @property
    def asked(self) -> list[str]:
        """Every lookup, in order."""
        return self._read("asked.jsonl")

    @property
    def dials(self) -> set[tuple[str, int]]:
        """Every address and port to which a connection was begun, or would have been."""
        return {(host, port) for host, port in self._read("dials.jsonl")}

    def _save(self) -> None:
        # In one move: a lookup reads the table as it was or as it is.
        fresh = self._folder / "names.json.new"
        fresh.write_text(json.dumps(self._table))
        fresh.replace(self._folder / "names.json")

    def _read(self, file: str) -> list[Any]:
        path = self._folder / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
