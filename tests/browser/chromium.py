"""Finds and starts the Chromium of this machine. `python -m tests.browser.chromium` fails if there is none.

Looks at WEBHOOKD_TEST_CHROMIUM and then at PATH. Imports only the standard library, because .ci/run runs it
before the environment of the tests exists.
"""

import os
import shutil
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser

VARIABLE = "WEBHOOKD_TEST_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
MISSING = f"no Chromium on PATH (install Debian's package chromium, or set {VARIABLE})"
FLAGS = (
    "--no-sandbox",  # as root, Chromium has no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # No page of a test reaches another machine, even if a test of this test bed asks for it.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--font-render-hinting=none",  # the same letters on every screen
)


def find_chromium() -> str | None:
    """Return the program, or None."""
    names = [os.environ[VARIABLE]] if os.environ.get(VARIABLE) else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


@asynccontextmanager
async def running_chromium(program: str) -> "AsyncIterator[Browser]":
    """Start it with an empty profile, and end it after the block."""
    from playwright.async_api import async_playwright  # noqa: PLC0415  see above

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


if __name__ == "__main__":
    sys.exit(0 if find_chromium() else MISSING)
