"""The page at `/`: what /status says, for a person. Pure: a status in, a page out."""

from datetime import datetime

from webhookd.http import health_responses
from webhookd.http.pages.html import Markup, Part, element, table
from webhookd.http.pages.layout import links, page

REFRESH_SECONDS = 5
_NOTHING = "—"
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def render(status: health_responses.Status, now: datetime) -> str:
    """The whole of it."""
    word = "ready" if status["ready"] else "not ready"
    content = (
        element("header", element("span", "webhookd", class_="brand"), links("/")),
        element(
            "main",
            _state(status),
            _facts(status, now),
            _section("Failing endpoints", _failing(status["failing_endpoints"], now)),
            _section("Backlog", _backlog(status["backlog"])),
            _section("Services", _services(status["services"])),
            _section("Configuration", _configuration(status["configuration"], now)),
        ),
        element("footer", f"{status['worker_id']} · {_time(now)} · refreshes every {REFRESH_SECONDS} s"),
    )
    return page(f"webhookd: {word}", *content, kind="status", refresh_seconds=REFRESH_SECONDS)


def _state(status: health_responses.Status) -> Markup:
    if status["ready"]:
        text, kind = "Work sent here is done.", "good"
    else:
        text, kind = "; ".join(status["unready_because"]), "bad"
    title = element("h1", "Ready" if status["ready"] else "Not ready")
    return element("div", title, element("p", text), class_=f"state {kind}", role="status")


def _facts(status: health_responses.Status, now: datetime) -> Markup:
    in_flight, dead_letters = status["in_flight"], status["dead_letters_of_a_day"]
    facts: dict[str, Part] = {
        "Version": status["version"],
        "Up for": _age(status["started_at"], now),
        "Database": "answers" if status["database"]["available"] else "does not answer",
        "Requests in flight": f"{in_flight['requests']} of {in_flight['concurrency']}",
        "Dead letters, 24 hours": _NOTHING if dead_letters is None else f"{dead_letters:,}",
    }
    if (queue := status["job_queue"]) and queue["enabled"]:
        most = queue["counted_up_to"]
        letters = "dead letter" if queue["dead_letter_open"] == 1 else "dead letters"
        facts["Jobs"] = (
            f"{_count(queue['backlog'], most)} queued, {_count(queue['in_progress'], most)} in progress, "
            f"{_count(queue['dead_letter_open'], most)} {letters}"
        )
    items = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items()]
    return element("dl", *items, class_="facts")


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content)


def _services(services: list[health_responses.ServiceStatus]) -> Markup:
    rows: list[tuple[Part, ...]] = [
        (
            service["name"],
            _badge(service["state"], good=service["state"] != "failing"),
            service["restarts"],
            service["last_error"] or _NOTHING,
        )
        for service in services
    ]
    return table(("Service", "State", "Restarts", "Last error"), rows)


def _backlog(backlog: health_responses.Backlog | None) -> Markup:
    if backlog is None:
        return _note("Not known: the database has not answered the last look.")
    most = backlog["counted_up_to"]
    rows: list[tuple[Part, ...]] = [
        (
            stage["stage"],
            _count(stage["waiting"], most),
            # By the database's clock on both sides.
            _age(stage["oldest_at"], backlog["seen_at"]) if stage["oldest_at"] else _NOTHING,
        )
        for stage in backlog["stages"]
    ]
    return table(("Stage", "Waiting", "Oldest for"), rows, class_="numbers")


def _failing(endpoints: list[health_responses.FailingEndpoint] | None, now: datetime) -> Markup:
    if endpoints is None:
        return _note("Not known: the database has not answered the last look.")
    if not endpoints:
        return _note("None.")
    rows: list[tuple[Part, ...]] = [
        (
            element(
                "a", endpoint["subscription_id"], href=f"/v1/subscriptions/{endpoint['subscription_id']}"
            ),
            f"{_time(endpoint['failing_since'])} ({_age(endpoint['failing_since'], now)})",
            f"{endpoint['consecutive_failures']:,}",
            endpoint["last_error_code"] or _NOTHING,
        )
        for endpoint in endpoints
    ]
    return table(("Subscription", "Since", "Failures in a row", "Last error"), rows)


def _configuration(configuration: health_responses.ConfigurationStatus, now: datetime) -> Markup:
    age = _age(configuration["last_read_at"], now)
    taken = configuration["last_reload_successful"]
    parts = [
        _badge("taken" if taken else "refused", good=taken),
        f" Last read {age} ago, at {_time(configuration['last_read_at'])}.",
    ]
    if configuration["last_reload_error"]:
        parts.append(element("pre", configuration["last_reload_error"]))
    if configuration["restart_needed"]:
        keys = ", ".join(configuration["restart_needed"])
        parts.append(element("p", f"Changed, and waiting for the next start: {keys}."))
    return element("div", *parts, class_="card")


def _badge(text: str, *, good: bool) -> Markup:
    return element("span", text, class_=f"badge {'good' if good else 'bad'}")


def _note(text: str) -> Markup:
    return element("p", text, class_="note")


def _count(number: int, most: int) -> str:
    return f"{number:,}" if number < most else f"{most:,} or more"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _age(since: datetime, now: datetime) -> str:
    """In the two largest units: `3 d 4 h`."""
    left = max(0, round((now - since).total_seconds()))
    parts = []
    for name, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 s"
