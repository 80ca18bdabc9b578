"""What the benchmark reads of others: /proc, nginx, PostgreSQL's log; and the payload that it sends."""

import json
import os
import time

import pytest

from tests.bench.machine import processor_model, system_name
from tests.bench.measures.latency import milliseconds
from tests.bench.publisher import due_times
from tests.bench.receivers import Arrival, parse_arrivals, parse_stub_status
from tests.bench.scale import payload
from tests.bench.server import count_statements
from tests.bench.small_receiver import header
from tests.bench.usage import TICKS_PER_SECOND, parse_memory, parse_stat, processor_seconds, tree_ticks


def stat(name: str, parent: int, *ticks: int) -> str:
    """The text of a stat file: user, system, and of ended children the same."""
    return f"7 ({name}) S {parent} 7 7 0 -1 4194304 1 2 3 4 {' '.join(map(str, ticks))} 20 0 1 0 99"


def test_a_process_has_the_time_of_its_ended_children() -> None:
    """Four numbers make it up; a name with blanks and parentheses shifts none of them."""
    assert parse_stat(stat("postgres: a (b) c", 3, 1, 20, 300, 4000)) == (3, 4321)


def test_a_tree_has_the_time_of_all_below() -> None:
    """Grandchildren too, strangers not; and a process that is gone took none."""
    processes = {10: (1, 1), 11: (10, 20), 12: (11, 300), 13: (1, 4000)}
    assert [tree_ticks(root, processes) for root in (10, 11, 13, 99)] == [321, 320, 4000, 0]


def test_the_time_of_a_real_process() -> None:
    """Ours is what Python says that it is, but for the ticks that are not full; ended children add to it."""
    used = time.process_time()
    assert processor_seconds(os.getpid()) >= used - 2 / TICKS_PER_SECOND > 0


def test_memory_is_read_by_its_name() -> None:
    """VmHWM is not VmRSS; one that is not there is an error."""
    status = "Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t   1024 kB\n"
    assert (parse_memory(status, "VmRSS"), parse_memory(status, "VmHWM")) == (1024**2, 2 * 1024**2)
    with pytest.raises(ValueError, match="VmSwap"):
        parse_memory(status, "VmSwap")


def test_nginx_counts_requests_in_the_third_place() -> None:
    """Not connections, which stand before it."""
    text = "Active connections: 2 \nserver accepts handled requests\n 16 17 31070 \nReading: 0 Writing: 1\n"
    assert parse_stub_status(text) == 31070


def test_a_half_written_arrival_is_none_yet() -> None:
    """It is read again when it is whole; one without correlation id is one all the same."""
    text = "1700000000.125 1700000000.100000\n1700000001.000 \n17000000"
    assert parse_arrivals(text) == [Arrival(1700000000.125, "1700000000.100000"), Arrival(1700000001.0, "")]
    assert parse_arrivals("17000000") == []


def test_latency_leaves_out_the_first_published() -> None:
    """By the time of publishing, in whichever order they arrived."""
    arrivals = [Arrival(100.0 + number + 0.25, str(100 + number)) for number in reversed(range(10))]
    arrivals[-1] = Arrival(109.0, "100")  # the first published, late for the connections that opened
    assert milliseconds(arrivals) == [250.0] * 8


def test_statements_are_counted_by_their_first_lines() -> None:
    """Both kinds; a statement's further lines, which are indented, and other messages are none."""
    log = b"""2026-01-01 00:00:00.000 UTC [1] LOG:  execute __asyncpg_stmt_1__: select 1
\tLOG:  execute this is text of the statement
2026-01-01 00:00:00.000 UTC [1] LOG:  statement: BEGIN;
2026-01-01 00:00:00.000 UTC [1] LOG:  checkpoint starting: time
2026-01-01 00:00:00.000 UTC [1] ERROR:  no
"""
    assert count_statements(log) == 2


def test_events_are_due_at_the_ends_of_ticks() -> None:
    """So many a second, together where several are in one tick, none before its own time."""
    assert due_times(400, 0.02, 100.0) == pytest.approx(
        [100.005] * 2 + [100.01] * 2 + [100.015] * 2 + [100.02] * 2
    )
    assert due_times(100, 0.03, 0.0) == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize("number", [0, 7, 123_456_789])
def test_a_payload_is_json_of_one_size(number: int) -> None:
    """400 bytes, and no two alike."""
    text = payload(number)
    assert (len(text.encode()), json.loads(text)["number"]) == (400, number)


def test_a_header_is_found_in_any_case() -> None:
    """And one that is not there is empty."""
    head = b"POST /timed HTTP/1.1\r\nHost: x\r\nWebhook-Correlation-Id: 12.5\r\nContent-Length: 400"
    assert (header(head, b"content-length"), header(head, b"webhook-correlation-id")) == (b"400", b"12.5")
    assert header(head, b"missing") == b""


def test_the_machine_is_named() -> None:
    """Or said to have no name."""
    assert processor_model("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n") == "AMD EPYC"
    assert processor_model("") == ""
    assert system_name('NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12"\n') == "Debian GNU/Linux 12"
    assert system_name("") == "an unnamed system"
