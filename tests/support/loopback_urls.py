"""Runs inside schemathesis, as its hooks: every URL that it makes up is of this machine."""

import schemathesis
from hypothesis import strategies

PORTS = strategies.integers(min_value=1024, max_value=65535)
PATHS = strategies.text("abcdefghijklmnopqrstuvwxyz0123456789-._~/", max_size=40)

schemathesis.openapi.format("uri", strategies.builds("https://127.0.0.1:{}/{}".format, PORTS, PATHS))
