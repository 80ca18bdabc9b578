"""A lock that is a file: held by whoever has it open, and so let go by whatever ends a process."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from webhookd.core.errors import EmbeddedError

POLL_INTERVAL_SECONDS = 0.02


class Lock:
    """One opening of the file. Not inherited by a program that is started, unless that is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Not through a link: root may be asked to use a folder of somebody else.
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self) -> None:
        """Hold it beside others; waits for nobody where only `try_alone` is used beside it."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def try_alone(self) -> bool:
        """Hold it alone, if nobody else holds it now. A share that was held may be lost by trying."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def alone(self, timeout_seconds: float) -> Iterator[None]:
        """Hold it alone for the length of the block, as soon as nobody else does."""
        deadline = time.monotonic() + timeout_seconds
        while not self.try_alone():
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"another webhookd has been starting or stopping PostgreSQL for {timeout_seconds:.0f} s "
                    f"(it holds {self.path})"
                )
            time.sleep(POLL_INTERVAL_SECONDS)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it, but for a program that inherited it."""
        os.close(self.descriptor)
