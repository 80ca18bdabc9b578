"""The built package contains the schema files, every file of webhookd/, the licence and the command.

Builds the wheel once, from a copy of the files that git tracks or would add.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_SECONDS = 120


def repository_files(folder: str = ".") -> set[str]:
    """Return the files of a folder that git tracks or does not ignore."""
    answer = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    # git also lists a file whose removal is not committed yet.
    return {name for name in answer.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the repository."""
    copy = tmp_path_factory.mktemp("repository")
    for name in repository_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "built"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    [built] = (copy / "built").glob("*.whl")
    return built


def test_wheel_contains_exactly_the_schema(wheel: Path) -> None:
    """Every file of schema/ is in the package with its content, and no other file is."""
    prefix = "webhookd/schema/"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    found = {name.removeprefix(prefix): packed[name] for name in packed if name.startswith(prefix)}
    expected = {
        name.removeprefix("schema/"): (ROOT / name).read_bytes() for name in repository_files("schema")
    }
    assert expected, "the repository has a schema"
    assert found == expected


def test_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    """Installing the package provides the command `webhookd`; the licence is included."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry_points] = [name for name in names if name.endswith("/entry_points.txt")]
        text = archive.read(entry_points).decode()
    assert "[console_scripts]\nwebhookd = webhookd.cli.main:main" in text
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    """The daemon reads its style sheets, templates and assets from the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = repository_files("webhookd")
    assert {Path(name).suffix for name in expected} >= {".css", ".py"}
    assert expected - names == set()
