"""What `webhookd status` shows of a daemon's /status document."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from webhookd.cli import output
from webhookd.cli.client import Client, Place
from webhookd.cli.status import screen

SERVICES = [
    "listener",
    "announcer",
    "monitor",
    "api",
    "routing",
    "orchestration",
    "results",
    "sweeps",
    "reports",
]


def status(**members: Any) -> dict[str, Any]:
    """A ready daemon's document, with some members replaced."""
    document: dict[str, Any] = {
        "version": "1.2.3",
        "worker_id": "host:1:abc",
        "started_at": "2026-01-31T08:00:00Z",
        "ready": True,
        "unready_because": [],
        "in_flight": {"requests": 3, "concurrency": 400},
        "services": [
            {"name": name, "state": "running", "restarts": 0, "last_error": None} for name in SERVICES
        ],
        "backlog": {"counted_up_to": 10_000, "seen_at": "2026-01-31T08:00:00Z", "stages": []},
        "failing_endpoints": [],
        "dead_letters_of_a_day": 0,
        "configuration": {"last_read_at": "2026-01-31T08:00:00Z", "last_reload_successful": True},
        "retry": {"max_attempts": 5, "base_delay_seconds": 30, "max_delay_seconds": 3600, "jitter": 0},
    }
    return document | members


def backlog(**waiting: int) -> dict[str, Any]:
    """Stages with this many rows, the oldest of each from the year 2001."""
    stages = [
        {"stage": stage, "waiting": count, "oldest_at": "2001-01-01T00:00:00Z"}
        for stage, count in waiting.items()
    ]
    return {"counted_up_to": 10_000, "seen_at": "2026-01-31T08:00:00Z", "stages": stages}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that renders a document to lines."""
    client = Client(Place(urlsplit("http://127.0.0.1:8470"), "the test"))

    def render(document: dict[str, Any]) -> list[str]:
        output.show(*screen(document, client))
        return capsys.readouterr().out.splitlines()

    return render


def test_failing_endpoints_are_not_waiting_work(lines: Any) -> None:
    """The stage `failing` counts endpoints, which have a table of their own."""
    shown = lines(status(backlog=backlog(routing=2, failing=7)))
    waiting = shown[shown.index("Waiting to be delivered") :]
    assert any("events to route" in line and " 2 " in line for line in waiting)
    assert not any("7" in line or "failing" in line for line in waiting)


def test_in_flight_has_one_meaning(lines: Any) -> None:
    """It counts requests of this instance."""
    shown = lines(status())
    [in_flight] = [line for line in shown if "in flight" in line or "in_flight" in line]
    assert in_flight.split() == ["requests", "in", "flight", "3", "of", "400", "(this", "instance)"]
    assert shown[-1] == "nothing"


def test_end_of_a_lease_is_not_shown_as_an_age(lines: Any) -> None:
    """For leased attempts `oldest_at` is when the first lease ends, perhaps in the future."""
    assert "2001" not in "\n".join(lines(status(backlog=backlog(in_flight=9))))
    assert "2001" in "\n".join(lines(status(backlog=backlog(delivery=9))))


def test_internal_services_are_hidden_unless_they_fail(lines: Any) -> None:
    """An operator knows the services of services.enabled; the others are named when they need attention."""
    document = status()
    [services] = [line for line in lines(document) if line.startswith("services")]
    assert services.split(maxsplit=1)[1] == "api, routing, orchestration"
    document["services"][2] |= {"state": "failing", "restarts": 4, "last_error": "broken"}
    shown = lines(document)
    assert "Services that failed" in shown
    assert any(line.split() == ["monitor", "failing", "4", "broken"] for line in shown)


@pytest.mark.parametrize(
    ("retention", "shown"),
    [
        ({"events_days": 0, "lag_seconds": None, "erasures_running": 0}, None),
        ({"events_days": 30, "lag_seconds": 0.0, "erasures_running": 0}, "events are removed after 30d"),
        ({"events_days": 30, "lag_seconds": 172_800.0, "erasures_running": 0}, "2d behind"),
        ({"events_days": 0, "lag_seconds": None, "erasures_running": 2}, "2 erasures running"),
    ],
)
def test_retention_is_shown_if_it_is_used(lines: Any, retention: dict[str, Any], shown: str | None) -> None:
    """The period, how far it is behind, and running erasures; nothing if everything is kept."""
    found = [line for line in lines(status(retention=retention)) if line.startswith("retention")]
    assert [shown in line for line in found] == ([] if shown is None else [True])
