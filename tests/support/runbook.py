"""Read deploy/RUNBOOK.md, the alerts and the dashboard: commands, requests, expressions."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tests.support import pages

DEPLOY = pages.ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RUNBOOK = DEPLOY / "RUNBOOK.md"


class Request(NamedTuple):
    """A request that the runbook makes with `ask`, its function around curl."""

    method: str
    path: str
    body: bytes | None


def requests() -> Iterator[Request]:
    """Yield every request of the runbook."""
    for line in _commands():
        for command in re.split(r" [|;] ", line):
            if command.startswith("ask "):
                _, *words = shlex.split(command)
                body = words[words.index("-d") + 1].encode() if "-d" in words else None
                [path] = [word.removeprefix("$WEBHOOKD_URL") for word in words if "$WEBHOOKD_URL" in word]
                yield Request("GET" if body is None else "POST", path, body)


def webhookd_commands() -> Iterator[list[str]]:
    """Yield the arguments of every `webhookd` command of the runbook."""
    for line in _commands():
        for command in re.split(r" (?:[|;]|&&) ", line):
            match = re.match(r"(?:\w+=\S+ )*(?:/opt/webhookd-NEW/bin/)?webhookd (.*)", command)
            if match:
                yield shlex.split(match[1].partition(" > ")[0])


def alerts() -> list[dict[str, Any]]:
    """Return the rules of all groups of alerts.yml."""
    return [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Return the Prometheus expressions of the alerts and the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text("utf-8"))
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    notes = [note["expr"] for note in dashboard["annotations"]["list"]]
    return [rule["expr"] for rule in alerts()] + panels + notes


def _commands() -> Iterator[str]:
    """Yield the lines of the shell blocks, without comments."""
    for block in pages.blocks(RUNBOOK, "sh"):
        for line in block.splitlines():
            yield re.sub(r"(^|\s+)# .*$", "", line).strip()
