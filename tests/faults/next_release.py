"""A synthetic next release: this source tree with a second migration and changed functions and triggers."""

import shutil
from pathlib import Path

from tests.support.command import ROOT
from webhookd.db.migrations import shipped

# It takes the locks that a real migration takes on the two busiest tables.
MIGRATION = """
alter table webhookd.webhook_delivery_sagas add column note text;
create index idx_saga_note on webhookd.webhook_delivery_sagas (note) where note is not null;
alter table webhookd.webhook_delivery_jobs add column note text;
"""
VERSION = "99.0.0"
NEWEST = shipped().migrations[-1].version + 1


def create_tree(folder: Path) -> Path:
    """Write the tree into the folder and return it, for a PYTHONPATH."""
    for part in ("webhookd", "schema"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    append(folder / "webhookd" / "__init__.py", f'\n__version__ = "{VERSION}"\n')
    append(folder / "schema" / "migrations" / f"{NEWEST:04d}_note.sql", MIGRATION)
    for changed in ("deliveries/routing.sql", "triggers.sql"):
        append(folder / "schema" / changed, "\n-- Changed, so that it is applied again.\n")
    return folder


def append(path: Path, text: str) -> None:
    """Add text to the end of a file, which may be new."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
