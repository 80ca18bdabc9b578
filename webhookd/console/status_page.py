"""The page at `/`: the content of /status for an operator with a browser. Needs the same scope as /status."""

from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web

from webhookd.core.settings import SERVICES
from webhookd.http import responses
from webhookd.http.health import (
    BacklogStatus,
    ConfigurationStatus,
    FailingEndpointStatus,
    InstanceStatus,
    ServiceStatus,
)
from webhookd.http.pages import Markup, Part, element, links, page, page_response, table
from webhookd.http.routes import HTML, Resource, route

REFRESH_SECONDS = 5
_NONE = "—"
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


class StatusPage(Resource):
    """The route of the status page."""

    def __init__(self, status: Callable[[], InstanceStatus]) -> None:
        self._status = status

    @route(
        "GET /",
        "read",
        "Show the status page",
        responses.Html,
        description="The content of /status, for a browser.",
        media_type=HTML,
        uses_database=False,
    )
    async def _get(self, _: web.Request) -> web.Response:
        return page_response(render(self._status(), datetime.now(UTC)))


def render(status: InstanceStatus, now: datetime) -> str:
    """Return the page for a status. Pure."""
    word = "ready" if status["ready"] else "not ready"
    content = (
        element("header", element("span", "webhookd", class_="brand"), links("/")),
        element(
            "main",
            _state(status),
            _facts(status, now),
            _section("Failing endpoints", _failing(status["failing_endpoints"], now)),
            _section("Waiting work", _backlog(status["backlog"])),
            _section("Services", _services(status["services"])),
            _section("Configuration", _configuration(status["configuration"], now)),
        ),
        element("footer", f"{status['worker_id']} · {_time(now)} · refreshes every {REFRESH_SECONDS} s"),
    )
    return page(f"webhookd: {word}", *content, kind="status", refresh_seconds=REFRESH_SECONDS)


def _state(status: InstanceStatus) -> Markup:
    if status["ready"]:
        title, text, kind = "Ready", "All services are running.", "good"
    else:
        title, text, kind = "Not ready", "; ".join(status["unready_because"]), "bad"
    return element("div", element("h1", title), element("p", text), class_=f"state {kind}", role="status")


def _facts(status: InstanceStatus, now: datetime) -> Markup:
    in_flight, dead_letters = status["in_flight"], status["dead_letters_of_a_day"]
    facts: dict[str, Part] = {
        "Version": status["version"],
        "Uptime": _age(status["started_at"], now),
        "Database": "available" if status["database"]["available"] else "unavailable",
        "Requests in flight": f"{in_flight['requests']} of {in_flight['concurrency']}",
        "Dead letters, last 24 hours": _NONE if dead_letters is None else f"{dead_letters:,}",
    }
    if (queue := status["job_queue"]) and queue["enabled"]:
        limit = queue["counted_up_to"]
        letters = "dead letter" if queue["dead_letter_open"] == 1 else "dead letters"
        facts["Job queue"] = (
            f"{_count(queue['backlog'], limit)} queued, {_count(queue['in_progress'], limit)} in progress, "
            f"{_count(queue['dead_letter_open'], limit)} {letters}"
        )
    items = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items()]
    return element("dl", *items, class_="facts")


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content)


def _services(services: list[ServiceStatus]) -> Markup:
    """Show the services that an operator can configure, and internal ones only after a failure."""
    rows: list[tuple[Part, ...]] = [
        (
            service["name"],
            _badge(service["state"], good=service["state"] != "failing"),
            service["restarts"],
            service["last_error"] or _NONE,
        )
        for service in services
        if service["name"] in SERVICES or service["state"] == "failing" or service["restarts"]
    ]
    return table(("Service", "State", "Restarts", "Last error"), rows)


def _backlog(backlog: BacklogStatus | None) -> Markup:
    if backlog is None:
        return _note("Unknown: the database does not answer.")
    limit = backlog["counted_up_to"]
    rows: list[tuple[Part, ...]] = [
        (
            stage["stage"],
            _count(stage["waiting"], limit),
            # Both times are from the database's clock.
            _age(stage["oldest_at"], backlog["seen_at"]) if stage["oldest_at"] else _NONE,
        )
        for stage in backlog["stages"]
    ]
    return table(("Stage", "Waiting", "Oldest"), rows, class_="numbers")


def _failing(endpoints: list[FailingEndpointStatus] | None, now: datetime) -> Markup:
    if endpoints is None:
        return _note("Unknown: the database does not answer.")
    if not endpoints:
        return _note("None.")
    rows: list[tuple[Part, ...]] = [
        (
            element(
                "a", endpoint["subscription_id"], href=f"/v1/subscriptions/{endpoint['subscription_id']}"
            ),
            f"{_time(endpoint['failing_since'])} ({_age(endpoint['failing_since'], now)})",
            f"{endpoint['consecutive_failures']:,}",
            endpoint["last_error_code"] or _NONE,
        )
        for endpoint in endpoints
    ]
    return table(("Subscription", "Failing since", "Consecutive failures", "Last error"), rows)


def _configuration(configuration: ConfigurationStatus, now: datetime) -> Markup:
    age = _age(configuration["last_read_at"], now)
    applied = configuration["last_reload_successful"]
    parts = [
        _badge("applied" if applied else "rejected", good=applied),
        f" Last read {age} ago, at {_time(configuration['last_read_at'])}.",
    ]
    if configuration["last_reload_error"]:
        parts.append(element("pre", configuration["last_reload_error"]))
    if configuration["restart_needed"]:
        keys = ", ".join(configuration["restart_needed"])
        parts.append(element("p", f"Changed; takes effect after a restart: {keys}."))
    return element("div", *parts, class_="card")


def _badge(text: str, *, good: bool) -> Markup:
    return element("span", text, class_=f"badge {'good' if good else 'bad'}")


def _note(text: str) -> Markup:
    return element("p", text, class_="note")


def _count(number: int, limit: int) -> str:
    return f"{number:,}" if number < limit else f"{limit:,} or more"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _age(since: datetime, now: datetime) -> str:
    """Return the time since then in its two largest units, as in `3 d 4 h`."""
    left = max(0, round((now - since).total_seconds()))
    parts = []
    for name, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 s"
