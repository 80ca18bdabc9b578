"""DNS answers of a test for a daemon in another process, and the addresses that the daemon dialled.

Exchanges files with tests/support/site/sitecustomize.py in a folder.
"""

import json
import os
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"


class Names:
    """The names that exist; a test may change them at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table: dict[str, list[str] | None] = {}
        self._save()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a daemon that uses these names."""
        path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), "TEST_NAMES_FOLDER": str(self._folder)}

    def answer(self, name: str, *addresses: str) -> None:
        """Set the addresses of a name from the next lookup on."""
        self._table[name] = list(addresses)
        self._save()

    def stay_silent(self, *names: str) -> None:
        """Let lookups of these names wait until they have an answer."""
        self._table |= dict.fromkeys(names)
        self._save()

    @property
    def lookups(self) -> list[str]:
        """Return every lookup, in order."""
        return self._read("lookups.jsonl")

    @property
    def dials(self) -> set[tuple[str, int]]:
        """Return every address and port that the daemon connected to or tried to."""
        return {(host, port) for host, port in self._read("dials.jsonl")}

    def _save(self) -> None:
        # One rename: a lookup reads either the old or the new table.
        fresh = self._folder / "names.json.new"
        fresh.write_text(json.dumps(self._table))
        fresh.replace(self._folder / "names.json")

    def _read(self, file: str) -> list[Any]:
        path = self._folder / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
