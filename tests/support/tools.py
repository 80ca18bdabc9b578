"""Runs external programs with a deadline."""

import os
import subprocess

TIMEOUT_SECONDS = 120


def run_program(program: str, *arguments: str, stdin: str = "", **environment: str) -> str:
    """Run a program that must succeed, and return its output."""
    done = subprocess.run(
        [program, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
