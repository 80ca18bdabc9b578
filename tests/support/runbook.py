"""deploy/RUNBOOK.md and its neighbours, taken apart: headings, links, blocks of commands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text("utf-8")


class Ask(NamedTuple):
    """A request that the runbook makes with curl."""

    method: str
    path: str
    body: bytes | None


def anchors() -> set[str]:
    """What a link may name: a heading in lower case, its spaces dashes, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", RUNBOOK, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(language: str) -> list[str]:
    """Its blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", RUNBOOK, re.MULTILINE | re.DOTALL)


def asked() -> Iterator[Ask]:
    """Every request that is made with `ask`."""
    for line in _commands():
        for command in re.split(r" [|;] ", line):
            if command.startswith("ask "):
                _, *words = shlex.split(command)
                body = words[words.index("-d") + 1].encode() if "-d" in words else None
                [path] = [word.removeprefix("$WEBHOOKD_URL") for word in words if "$WEBHOOKD_URL" in word]
                yield Ask("GET" if body is None else "POST", path, body)


def webhookd_commands() -> Iterator[list[str]]:
    """The words after every `webhookd` that is run."""
    for line in _commands():
        for command in re.split(r" (?:[|;]|&&) ", line):
            match = re.match(r"(?:\w+=\S+ )*(?:/opt/webhookd\.new/bin/)?webhookd (.*)", command)
            if match:
                yield shlex.split(match[1].partition(" > ")[0])


def alerts() -> list[dict[str, Any]]:
    """The rules of alerts.yml, of all groups."""
    return [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """What alerts and dashboard ask Prometheus."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text("utf-8"))
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    notes = [note["expr"] for note in dashboard["annotations"]["list"]]
    return [rule["expr"] for rule in alerts()] + panels + notes


def _commands() -> Iterator[str]:
    """The lines of its shell blocks, without comments."""
    for block in blocks("sh"):
        for line in block.splitlines():
            yield re.sub(r"(^|\s+)# .*$", "", line).strip()
