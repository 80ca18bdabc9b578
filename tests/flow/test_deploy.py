"""Alerts, dashboard, runbook, docs/metrics.md and docs/api.md agree with a running daemon."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from tests.flow.conftest import MakeDaemon
from tests.support import pages, runbook
from tests.support.daemon import DaemonProcess

METRICS_PAGE, API_PAGE = pages.ROOT / "docs" / "metrics.md", pages.ROOT / "docs" / "api.md"
# Labels that Prometheus adds to every series, and that a histogram has.
OWN_LABELS = {"job", "instance", "le"}
RATED = {"rate", "increase"}
# Labels whose values depend on the requests so far.
OPEN_LABELS = {("webhookd_api_responses_total", "route"), ("webhookd_api_responses_total", "status")}


class Metric(NamedTuple):
    """A metric of /metrics: its type, and its labels with their values."""

    kind: str
    labels: dict[str, set[str]]


class Use(NamedTuple):
    """A metric in an expression, with the function around it and its matchers."""

    name: str
    function: str
    matchers: list[tuple[str, str, str]]


def uses(expression: str) -> Iterator[Use]:
    """Yield every metric of an expression."""
    for match in re.finditer(r"\b(webhookd_\w+|process_\w+)(?:\{([^}]*)\})?", expression):
        function = re.search(r"(\w+)\($", expression[: match.start()])
        matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', match[2] or "")
        yield Use(match[1], function[1] if function else "", matchers)


def metrics_of(daemon: DaemonProcess) -> dict[str, Metric]:
    """Return the metrics of /metrics by the names of their samples."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(daemon.get("/metrics")[1].decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, Metric(family.type, {})).labels
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


async def test_alerts_and_dashboard_use_existing_metrics(make_daemon: MakeDaemon) -> None:
    """Every metric, label and value exists; counters are used with a rate, and gauges without."""
    daemon = await make_daemon().start()
    daemon.get("/v1/events")
    await daemon.until(lambda: "webhookd_backlog" in metrics_of(daemon), "backlog read")
    metrics = metrics_of(daemon)
    expressions = runbook.expressions()
    assert len(expressions) > 20
    for expression in expressions:
        labels = set(OWN_LABELS)
        for use in uses(expression):
            assert use.name in metrics, expression
            metric = metrics[use.name]
            labels |= set(metric.labels)
            assert (use.function in RATED) == (metric.kind in {"counter", "histogram"}), expression
            for label, operator, value in use.matchers:
                assert label in OWN_LABELS | set(metric.labels), expression
                if label in metric.labels and (use.name, label) not in OPEN_LABELS:
                    wanted = set(value.split("|")) if operator in {"=~", "!~"} else {value}
                    assert wanted <= metric.labels[label], expression
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        assert {label for group in grouped for label in group.split(", ") if label} <= labels, expression


async def test_requests_of_runbook_are_valid(make_daemon: MakeDaemon) -> None:
    """Every request of the runbook has a route and a valid body."""
    daemon = await make_daemon().start()
    requests = list(runbook.requests())
    assert requests
    for request in requests:
        if request.body is None:
            assert daemon.get(request.path)[0] in {200, 404}, request
        else:
            assert daemon.post(request.path, request.body)[0] == 200, request
    assert daemon.metric("webhookd_api_responses_total", route="none") == 0


async def test_reference_pages_list_metrics_and_routes(make_daemon: MakeDaemon) -> None:
    """docs/metrics.md has every metric with its type and labels, docs/api.md every route with its scope."""
    daemon = await make_daemon().start()
    daemon.get("/v1/events")
    await daemon.until(lambda: "webhookd_backlog" in metrics_of(daemon), "backlog read")
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+)(?:, \*all instances\*)? \| (.*?) ?\| .* \|$",
        METRICS_PAGE.read_text("utf-8"),
        re.MULTILINE,
    )
    documented = {(name, kind, tuple(sorted(re.findall(r"\w+", labels)))) for name, kind, labels in rows}
    families = text_string_to_metric_families(daemon.get("/metrics")[1].decode())
    assert documented == {_documented(family) for family in families}

    routes = json.loads(daemon.get("/openapi.json")[1])["paths"]
    scopes = {
        (f"{method.upper()} {path}", _scope(operation))
        for path, methods in routes.items()
        for method, operation in methods.items()
    }
    rows = re.findall(r"^\| `(\w+ /\S*)` \| `?(\w+)`? \|", API_PAGE.read_text("utf-8"), re.MULTILINE)
    assert set(rows) == scopes


def _documented(family: Family) -> tuple[str, str, tuple[str, ...]]:
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, tuple(sorted(labels))


def _scope(operation: dict[str, Any]) -> str:
    needed = [scope for option in operation["security"] for scope in option.get("token", ())]
    return needed[0] if needed else "none"
