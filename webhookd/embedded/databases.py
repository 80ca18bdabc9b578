"""Prepares a server for webhookd: initdb, the database, and the daemon's login."""

import subprocess
import sys
from pathlib import Path

from webhookd.core.errors import EmbeddedError
from webhookd.embedded.folder import PORT, Folder
from webhookd.embedded.installation import PROGRAM_TIMEOUT_SECONDS, Installation, start_program

INITIALIZE_TIMEOUT_SECONDS = 120
# Since this version there is a builtin collation, which does not change with the system's C library, and a
# single sync for all files: on a busy machine syncing each file took 4.0 s of 6.8 s.
BUILTIN_LOCALE_MAJOR = 17
# webhookd_app is created before the migrations, which then keep it: the login needs no grant after them.
CREATE_LOGIN = """
do $$
begin
    if to_regrole('webhookd_app') is null then
        create role webhookd_app nologin;
    end if;
    if to_regrole('webhookd') is null then
        create role webhookd login;
    end if;
    grant webhookd_app to webhookd;
end
$$
"""


def initialize(folder: Folder, installation: Installation, lock: int) -> None:
    """Run initdb in a temporary folder, and rename it to pgdata when it is complete and on disk.

    initdb inherits the server's lock: if this process is killed, the next start waits until initdb ends.
    """
    log_position = folder.log_size()
    new = folder.new_pgdata()
    newer_options: list[str] = []
    if installation.major >= BUILTIN_LOCALE_MAJOR:
        newer_options = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        newer_options += ["--sync-method=syncfs"] * (sys.platform == "linux")
    arguments = [
        *(f"--pgdata={new}", "--username=postgres"),
        *("--auth-local=trust", "--auth-host=reject"),
        *("--encoding=UTF8", "--locale=C", *newer_options),
        *("--data-checksums", "--no-instructions"),
    ]
    with installation.with_shell_safe_path() as programs:
        process = folder.start([programs.program("initdb"), *arguments], pass_fds=(lock,))
        try:
            code = process.wait(INITIALIZE_TIMEOUT_SECONDS)
        except BaseException:
            process.terminate()
            process.wait(PROGRAM_TIMEOUT_SECONDS)
            raise
    if code != 0:
        raise EmbeddedError(f"initdb failed in {folder.path}: {folder.error_since(log_position)}")
    new.rename(folder.pgdata)


def ensure_login(folder: Folder, installation: Installation, socket_folder: Path) -> str:
    """Create the database and the login if they are missing; returns the server's version."""

    def run(*statements: str) -> list[str]:
        return _psql(folder, installation, socket_folder, *statements)

    [databases, version] = run(
        CREATE_LOGIN, "select count(*) from pg_database where datname = 'webhookd'", "show server_version"
    )
    if databases == "0":
        run("create database webhookd")
    return version.split()[0]


def _psql(folder: Folder, installation: Installation, socket_folder: Path, *statements: str) -> list[str]:
    command = [
        *(installation.program("psql"), "--no-psqlrc", "--quiet", "--tuples-only", "--no-align"),
        *("--set=ON_ERROR_STOP=1", f"--host={socket_folder}", f"--port={PORT}"),
        *("--username=postgres", "--dbname=postgres", "--no-password"),
        *(f"--command={statement}" for statement in statements),
    ]
    process = start_program(command, folder.account, folder.path, subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=PROGRAM_TIMEOUT_SECONDS)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        reason = errors.decode(errors="replace").split("\n")[0] or "psql failed"
        raise EmbeddedError(f"PostgreSQL in {folder.path} cannot be used: {reason}")
    return output.decode().splitlines()
