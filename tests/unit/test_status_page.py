"""The status page: its content, and that text from outside never becomes markup."""

from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any, cast

from webhookd.console import status_page
from webhookd.http.health import InstanceStatus

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
HOSTILE = """<script>alert("1")</script>'&<img src=x onerror=y>"""


class ParsedPage(HTMLParser):
    """The elements and the text of a page, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect it."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Collect it."""
        self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


JOBS = {"enabled": True, "backlog": 1234, "in_progress": 2, "dead_letter_open": 2000, "counted_up_to": 2000}


def status(text: str = "harmless", **changed: Any) -> InstanceStatus:
    """Return a status in which every text is `text`."""
    found: dict[str, Any] = {
        "version": text,
        "worker_id": text,
        "started_at": NOW - timedelta(days=3, hours=4, seconds=5),
        "ready": False,
        "unready_because": [text],
        "draining": False,
        "database": {"available": True},
        "in_flight": {"requests": 12, "concurrency": 200},
        "dead_letters_of_a_day": 3,
        "services": [{"name": text, "state": "failing", "restarts": 7, "last_error": text}],
        "backlog": {
            "seen_at": NOW,
            "counted_up_to": 10_000,
            "stages": [
                {"stage": text, "waiting": 10_000, "oldest_at": NOW - timedelta(seconds=845)},
                {"stage": text, "waiting": 0, "oldest_at": None},
            ],
        },
        "failing_endpoints": [
            {
                "subscription_id": 42,
                "failing_since": NOW - timedelta(minutes=90),
                "consecutive_failures": 1722,
                "last_error_code": text,
            }
        ],
        "job_queue": JOBS,
        "configuration": {
            "last_read_at": NOW - timedelta(seconds=59),
            "last_reload_successful": False,
            "last_reload_error": text,
            "restart_needed": [text],
        },
        "retry": {"max_attempts": 5, "base_delay_seconds": 1, "max_delay_seconds": 1, "jitter": 0},
    }
    return cast("InstanceStatus", found | changed)


def test_status_page_shows_every_part_of_the_status() -> None:
    """Each part of the status appears, with readable numbers and times."""
    seen = ParsedPage(status_page.render(status("routing"), NOW))
    for shown in (
        "Not ready",
        "3 d 4 h",
        "12 of 200",
        "failing",
        "10,000 or more",
        "14 min 5 s",
        "2026-03-01 10:30:00 UTC (1 h 30 min)",
        "1,722",
        "rejected",
        "59 s ago",
        "1,234 queued, 2 in progress, 2,000 or more dead letters",
    ):
        assert shown in seen.text, shown
    hrefs = {attributes.get("href") for _, attributes in seen.elements}
    assert {"/docs", "/status", "/metrics", "/v1/subscriptions/42"} <= hrefs


def test_status_page_of_a_ready_instance_and_without_database() -> None:
    """A ready instance shows no problem; without a database the page says unknown instead of old numbers."""
    ready = ParsedPage(status_page.render(status(ready=True, failing_endpoints=[]), NOW)).text
    assert "Not ready" not in ready
    assert "All services are running." in ready
    assert "None." in ready
    one_dead_letter = ParsedPage(
        status_page.render(status(job_queue=JOBS | {"dead_letter_open": 1}), NOW)
    ).text
    assert "in progress, 1 dead letter" in one_dead_letter
    assert "1 dead letters" not in one_dead_letter
    assert (
        "queued" not in ParsedPage(status_page.render(status(job_queue=JOBS | {"enabled": False}), NOW)).text
    )
    without_database = status(
        backlog=None, job_queue=None, failing_endpoints=None, database={"available": False}
    )
    assert ParsedPage(status_page.render(without_database, NOW)).text.count("Unknown") == 2


def test_internal_services_are_hidden_unless_they_failed() -> None:
    """An operator cannot configure the listener or the monitor, so they appear only after a failure."""
    services = [
        {"name": "routing", "state": "running", "restarts": 0, "last_error": None},
        {"name": "listener", "state": "running", "restarts": 0, "last_error": None},
        {"name": "monitor", "state": "running", "restarts": 2, "last_error": "OSError"},
    ]
    text = ParsedPage(status_page.render(status(services=services), NOW)).text
    assert "routing" in text
    assert "listener" not in text
    assert "monitor" in text


def test_hostile_text_is_escaped() -> None:
    """Text from an endpoint, a file or an error is shown unchanged and never becomes markup."""
    harmless = ParsedPage(status_page.render(status(), NOW))
    hostile = ParsedPage(status_page.render(status(HOSTILE), NOW))
    assert hostile.elements == harmless.elements
    assert hostile.text.replace(HOSTILE, "harmless") == harmless.text
    assert hostile.text.count(HOSTILE) >= 9
