"""The release before this one: its tree, unpacked from the history, and a database of its making."""

import io
import subprocess
import tarfile
from pathlib import Path

from tests.faults.surroundings import Missing
from tests.support.command import ROOT, Command
from tests.support.database import Cluster, Database

PARTS = ("webhookd", "schema")


def unpack(commit: str, folder: Path) -> Path:
    """Where it lies, for a PYTHONPATH."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, *PARTS]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"the history has no {commit} to unpack") from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


async def create_database(cluster: Cluster, tree: Path) -> Database:
    """By its own `webhookd migrate`; the roles are the cluster's, and there already."""
    database = await cluster.create_database(migrated=False)
    ended = await Command(tree).run("migrate", dsn=database.dsn("migrator"), PYTHONPATH=str(tree))
    assert ended.code == 0, ended.err
    return database
