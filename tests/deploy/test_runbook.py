"""The runbook: alerts lead into it, its links lead somewhere, its commands and its SQL are real."""

import re
import shutil
from pathlib import Path

import click
import pytest

from tests.support import runbook
from tests.support.database import Database
from tests.support.tools import content
from webhookd.cli.main import COMMANDS, commands

# The contract's, of which COMMANDS has those that are built.
CONTRACT = (
    "serve migrate check status publish subscriptions deliveries dead-letters token demo listen bench jobs"
)


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    """A name, a severity, a summary, a description, and a section of the runbook that exists."""
    rules = runbook.alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 0
    for rule in rules:
        assert rule["labels"]["severity"] in {"page", "ticket", "info"}, rule["alert"]
        notes = rule["annotations"]
        assert notes["summary"], rule["alert"]
        assert notes["description"], rule["alert"]
        page, _, section = notes["runbook_url"].partition("#")
        assert page == "RUNBOOK.md"
        assert section in runbook.anchors(), rule["alert"]


def test_its_links_lead_somewhere() -> None:
    """Each link into itself names a heading."""
    linked = re.findall(r"\]\(#([^)]*)\)", runbook.RUNBOOK)
    assert linked
    assert set(linked) <= runbook.anchors()


def test_prometheus_takes_the_alerts() -> None:
    """Where promtool is, it checks the rules and runs their tests; everywhere, each has its keys."""
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in runbook.alerts())
    if shutil.which("promtool"):
        tests = Path(__file__).with_name("alerts_test.yml")
        content("promtool", "check", "rules", str(runbook.ALERTS))
        content("promtool", "test", "rules", str(tests))


@pytest.mark.parametrize("words", list(runbook.webhookd_commands()), ids=" ".join)
def test_its_commands_are_commands(words: list[str]) -> None:
    """Each is one of the contract's; and one that is built takes these words."""
    if words[0] not in COMMANDS:
        assert words[0] in CONTRACT.split()
        return
    command: click.Command = commands
    context = click.Context(command, info_name="webhookd")
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, context, info_name=name)
    if "--help" not in words:
        command.make_context(command.name, words, parent=context.parent)


async def test_a_reader_may_run_its_sql(database: Database) -> None:
    """Every statement, as a login that has webhookd_reader and nothing else."""
    reader = await database.connect("reader")
    statements = [one for block in runbook.blocks("sql") for one in block.split(";\n") if one.strip()]
    assert statements
    for statement in statements:
        await reader.fetch(statement)
