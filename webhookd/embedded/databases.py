"""What a server needs before webhookd can use it: its files, a database, and the daemon's login."""

import subprocess
import sys
from pathlib import Path

from webhookd.core.errors import EmbeddedError
from webhookd.embedded.folder import PORT, Folder
from webhookd.embedded.installation import PROGRAM_TIMEOUT_SECONDS, Installation, start_program

INITIALIZE_TIMEOUT_SECONDS = 120
# From here on there is a collation that no update of the system's library changes; and one sync for all
# files, which on a busy machine made 4.0 s of 6.8.
BUILTIN_LOCALE_MAJOR = 17
# Its role is there before the migrations, which then leave it as it is: the login needs no grant after them.
LOGIN = """
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


def make_databases(folder: Folder, installation: Installation, lock: int) -> None:
    """Make pgdata: aside, and moved when it is whole and on the disk.

    initdb inherits the server's lock: should we be killed, the next start waits for its end.
    """
    said = folder.log_size()
    new = folder.new_pgdata()
    newer: list[str] = []
    if installation.major >= BUILTIN_LOCALE_MAJOR:
        newer = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        newer += ["--sync-method=syncfs"] * (sys.platform == "linux")
    arguments = [
        *(f"--pgdata={new}", "--username=postgres"),
        *("--auth-local=trust", "--auth-host=reject"),
        *("--encoding=UTF8", "--locale=C", *newer),
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
        complaint = folder.complaint_since(said)
        raise EmbeddedError(f"PostgreSQL cannot be set up in {folder.path}: {complaint}")
    new.rename(folder.pgdata)


def see_to_login(folder: Folder, installation: Installation, socket_folder: Path) -> str:
    """Make database and login where they are missing; the server's version."""

    def ask(*statements: str) -> list[str]:
        return _psql(folder, installation, socket_folder, *statements)

    [there, version] = ask(
        LOGIN, "select count(*) from pg_database where datname = 'webhookd'", "show server_version"
    )
    if there == "0":
        ask("create database webhookd")
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
        words = errors.decode(errors="replace").split("\n")[0] or "psql failed"
        raise EmbeddedError(f"PostgreSQL in {folder.path} cannot be used: {words}")
    return output.decode().splitlines()
