"""Programs of others that a test asks: run with a deadline, and to their content."""

import os
import subprocess

TIMEOUT_SECONDS = 120


def content(program: str, *arguments: str, said: str = "", **environment: str) -> str:
    """What a program says to its arguments and input; it must end with 0."""
    done = subprocess.run(
        [program, *arguments],
        input=said,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
