"""`make screenshots`: pictures of the console with the demo data, in docs/images/console/.

Opens each page wide, in the light and in the dark colour scheme. Arguments choose some of the pages. Times
and ports differ in every run, so commit a picture only if its page has changed.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import MISSING, find_chromium, running_chromium
from tests.browser.sites import demo_site
from tests.browser.visitor import View, visiting
from tests.support.certificates import Certificates
from tests.support.database import Cluster
from tests.support.sources import first, sources

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images" / "console"
PICTURED = {"light": View(), "dark": View(scheme="dark")}
# The pages that the documentation shows, by the names of their files.
PAGES = {
    "/": "overview",
    "/events/1": "event",
    "/deliveries/1": "delivery",
    "/endpoints": "endpoints",
    "/endpoints/1": "endpoint",
}


async def main(paths: list[str]) -> int:
    """Make the pictures of these pages, and return the exit code."""
    program = find_chromium()
    if program is None:
        print(MISSING, file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    server = first(sources()).make_server()
    await asyncio.to_thread(server.start)
    cluster = Cluster(server)
    try:
        await cluster.prepare()
        with tempfile.TemporaryDirectory() as folder:
            certificates = Certificates.make(Path(folder))
            async with (
                demo_site(cluster, certificates, Path(folder)) as site,
                running_chromium(program) as browser,
            ):
                for path in paths:
                    for kind, view in PICTURED.items():
                        address = f"http://127.0.0.1:{site.daemon.port}"
                        async with visiting(browser, address, view) as visitor:
                            await visitor.open(path)
                            file = FOLDER / f"{PAGES[path]}-{kind}.png"
                            await visitor.page.screenshot(path=file)
                            print(file.name)
    finally:
        await cluster.remove()
        await asyncio.to_thread(server.stop)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="*", choices=[[], *PAGES], help="default: all pages")
    sys.exit(asyncio.run(main(parser.parse_args().page or list(PAGES))))
