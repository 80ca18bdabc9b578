"""What deploy/ says of the daemon, held against one that runs: its metrics, and the routes of the runbook."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.flow.conftest import MakeDaemon
from tests.support import runbook
from tests.support.daemon import DaemonProcess

# What Prometheus adds to every series, and a histogram to its own.
OWN_LABELS = {"job", "instance", "le"}
RATED = {"rate", "increase"}
# Whose values are the callers' and the time's: what is asked for need not have happened yet.
OPEN_LABELS = {("webhookd_api_responses_total", "route"), ("webhookd_api_responses_total", "status")}


class Seen(NamedTuple):
    """A metric of /metrics: what it is, and its labels with their values."""

    kind: str
    labels: dict[str, set[str]]


class Use(NamedTuple):
    """A metric in an expression: the function around it, and its matchers."""

    name: str
    function: str
    matchers: list[tuple[str, str, str]]


def uses(expression: str) -> Iterator[Use]:
    """Every metric that an expression asks for."""
    for match in re.finditer(r"\b(webhookd_\w+|process_\w+)(?:\{([^}]*)\})?", expression):
        function = re.search(r"(\w+)\($", expression[: match.start()])
        matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', match[2] or "")
        yield Use(match[1], function[1] if function else "", matchers)


def metrics_of(daemon: DaemonProcess) -> dict[str, Seen]:
    """What /metrics shows, by the names of the samples."""
    seen: dict[str, Seen] = {}
    for family in text_string_to_metric_families(daemon.get("/metrics")[1].decode()):
        for sample in family.samples:
            labels = seen.setdefault(sample.name, Seen(family.type, {})).labels
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return seen


async def test_alerts_and_dashboard_ask_for_what_there_is(make_daemon: MakeDaemon) -> None:
    """Every metric, label and value exists; what counts is asked for its rate, and what measures is not."""
    daemon = await make_daemon().start()
    daemon.get("/v1/events")
    await daemon.until(lambda: "webhookd_backlog" in metrics_of(daemon), "looked at")
    seen = metrics_of(daemon)
    asked = runbook.expressions()
    assert len(asked) > 20
    for expression in asked:
        labels = set(OWN_LABELS)
        for use in uses(expression):
            assert use.name in seen, expression
            metric = seen[use.name]
            labels |= set(metric.labels)
            assert (use.function in RATED) == (metric.kind in {"counter", "histogram"}), expression
            for label, operator, value in use.matchers:
                assert label in OWN_LABELS | set(metric.labels), expression
                if label in metric.labels and (use.name, label) not in OPEN_LABELS:
                    wanted = set(value.split("|")) if operator in {"=~", "!~"} else {value}
                    assert wanted <= metric.labels[label], expression
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        assert {label for group in grouped for label in group.split(", ") if label} <= labels, expression


async def test_the_runbook_asks_for_routes_that_exist(make_daemon: MakeDaemon) -> None:
    """No request of it leads to no route, or is refused for what it says."""
    daemon = await make_daemon().start()
    requests = list(runbook.asked())
    assert requests
    for request in requests:
        if request.body is None:
            assert daemon.get(request.path)[0] in {200, 404}, request
        else:
            assert daemon.post(request.path, request.body)[0] == 200, request
    assert daemon.metric("webhookd_api_responses_total", route="none") == 0
