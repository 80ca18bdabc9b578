"""Alerts link to existing sections of the runbook, and its commands, log texts and SQL are valid."""

import re
import shutil
from pathlib import Path

import click
import pytest

from tests.support import pages, runbook
from tests.support.database import Database
from tests.support.tools import run_program
from webhookd.cli.main import commands

# Messages of PostgreSQL, not of webhookd, that the runbook searches for in the log.
POSTGRESQL_MESSAGES = {"read-only", "No space", "standby", "could not extend"}


def test_every_alert_links_to_runbook() -> None:
    """Each alert has a unique name, a severity, a summary, a description and an existing section."""
    rules = runbook.alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 0
    for rule in rules:
        assert rule["labels"]["severity"] in {"page", "ticket", "info"}, rule["alert"]
        notes = rule["annotations"]
        assert notes["summary"], rule["alert"]
        assert notes["description"], rule["alert"]
        page, _, section = notes["runbook_url"].partition("#")
        assert page == "RUNBOOK.md"
        assert section in pages.anchors(runbook.RUNBOOK), rule["alert"]


def test_log_texts_exist_in_code() -> None:
    """Each text that the runbook searches for in the log is written by webhookd or PostgreSQL."""
    lines = re.findall(r"^(?:journalctl|problems) .*", runbook.RUNBOOK.read_text("utf-8"), re.MULTILINE)
    searched = [text for line in lines for text in re.findall(r"grep (?:-E )?'([^']*)'", line)]
    texts = {text for pattern in searched for text in pattern.split("|") if '"' not in text}
    code = "".join(path.read_text("utf-8") for path in (pages.ROOT / "webhookd").rglob("*.py"))
    assert texts > POSTGRESQL_MESSAGES
    assert {text for text in texts - POSTGRESQL_MESSAGES if text not in code} == set()


def test_promtool_accepts_alerts() -> None:
    """Each rule has its keys; if promtool is installed, it checks the rules and runs their tests."""
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in runbook.alerts())
    if shutil.which("promtool"):
        tests = Path(__file__).with_name("alerts_test.yml")
        run_program("promtool", "check", "rules", str(runbook.ALERTS))
        run_program("promtool", "test", "rules", str(tests))


@pytest.mark.parametrize("words", list(runbook.webhookd_commands()), ids=" ".join)
def test_webhookd_accepts_command(words: list[str]) -> None:
    """The command exists and accepts its arguments."""
    command: click.Command = commands
    context = click.Context(command, info_name="webhookd")
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, context, info_name=name)
    if "--help" not in words:
        command.make_context(command.name, words, parent=context.parent)


async def test_reader_can_run_sql(database: Database) -> None:
    """A login with webhookd_reader and nothing else can run every statement."""
    reader = await database.connect("reader")
    blocks = pages.blocks(runbook.RUNBOOK, "sql")
    statements = [statement for block in blocks for statement in block.split(";\n") if statement.strip()]
    assert statements
    for statement in statements:
        await reader.fetch(statement)
