"""Tests of the benchmark harness: /proc, the logs of nginx and PostgreSQL, payloads and due times."""

import asyncio
import json
import os
import ssl
import time
from pathlib import Path

import aiohttp
import pytest

from tests.bench.machine import processor_model, system_name, tree_processor_seconds, tree_ticks
from tests.bench.receivers import parse_stub_status
from tests.bench.server import count_statements
from webhookd.devtools.bench_load import (
    LoggedArrival,
    due_times,
    header,
    latencies_ms,
    parse_arrivals,
    payload,
    percentile,
    receiver_process,
)
from webhookd.devtools.processes import (
    TICKS_PER_SECOND,
    ChildFailed,
    ProcessStat,
    memory_bytes,
    parse_memory,
    parse_stat,
    processor_seconds,
    python_module,
    start_child,
)
from webhookd.local_certificate import LocalCertificate


def test_parse_stat() -> None:
    """A name with blanks and parentheses shifts no field."""
    text = "7 (postgres: a (b) c) S 3 7 7 0 -1 4194304 1 2 3 4 1 20 300 4000 20 0 1 0 99"
    assert parse_stat(text) == ProcessStat("postgres: a (b) c", 3, 21, 4300)


def test_tree_includes_grandchildren_and_ended_children() -> None:
    """Unrelated processes are left out; a process that does not exist used no time."""
    processes = {
        10: ProcessStat("a", 1, 1, 0),
        11: ProcessStat("b", 10, 12, 8),
        12: ProcessStat("c", 11, 300, 0),
        13: ProcessStat("d", 1, 4000, 0),
    }
    assert [tree_ticks(root, processes) for root in (10, 11, 13, 99)] == [321, 320, 4000, 0]


def test_processor_seconds_of_this_process() -> None:
    """Equal to Python's own number, except for incomplete ticks."""
    used = time.process_time()
    own = processor_seconds(os.getpid())
    assert own is not None
    assert own >= used - 2 / TICKS_PER_SECOND > 0
    assert tree_processor_seconds(os.getpid()) >= own


def test_processor_seconds_of_a_foreign_process() -> None:
    """None if the process does not exist or has another name: a server elsewhere has process ids too."""
    assert processor_seconds(2**22 + 1) is None
    assert processor_seconds(os.getpid(), "postgres") is None


def test_memory_is_read_by_field() -> None:
    """VmHWM is not VmRSS; a missing field is an error."""
    status = "Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t   1024 kB\n"
    assert (parse_memory(status, "VmRSS"), parse_memory(status, "VmHWM")) == (1024**2, 2 * 1024**2)
    with pytest.raises(ValueError, match="VmSwap"):
        parse_memory(status, "VmSwap")
    assert 0 < memory_bytes(os.getpid()) <= memory_bytes(os.getpid(), "VmHWM")


def test_stub_status_of_nginx() -> None:
    """Requests are the third number; the first two count connections."""
    text = "Active connections: 2 \nserver accepts handled requests\n 16 17 31070 \nReading: 0 Writing: 1\n"
    assert parse_stub_status(text) == 31070


def test_incomplete_arrival_is_ignored() -> None:
    """It is read later; an arrival without a correlation id counts."""
    text = "1700000000.125 1700000000.100000\n1700000001.000 \n17000000"
    assert parse_arrivals(text) == [
        LoggedArrival(1700000000.125, "1700000000.100000"),
        LoggedArrival(1700000001.0, ""),
    ]
    assert parse_arrivals("17000000") == []


def test_latency_skips_the_first_events() -> None:
    """By the time of publishing, in whichever order they arrived."""
    arrivals = [LoggedArrival(100.0 + number + 0.25, str(100 + number)) for number in reversed(range(10))]
    arrivals[-1] = LoggedArrival(109.0, "100")  # the first event, late because connections were opening
    assert latencies_ms(arrivals, skipped_share=0.2) == [250.0] * 8


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_percentile_is_a_measured_value(percent: int, expected: int) -> None:
    """The nearest rank of 1 to 100 is the percentage itself, in whichever order they come."""
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_percentile_of_few_values() -> None:
    """Of two values the larger is every percentile above 50; without values there is none."""
    assert [percentile([7, 3], percent) for percent in (50, 51, 99)] == [3, 7, 7]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_statements_are_counted_by_their_first_lines() -> None:
    """Indented further lines of a statement and other messages do not count."""
    log = b"""2026-01-01 00:00:00.000 UTC [1] LOG:  execute __asyncpg_stmt_1__: select 1
\tLOG:  execute this is text of the statement
2026-01-01 00:00:00.000 UTC [1] LOG:  statement: BEGIN;
2026-01-01 00:00:00.000 UTC [1] LOG:  checkpoint starting: time
2026-01-01 00:00:00.000 UTC [1] ERROR:  no
"""
    assert count_statements(log) == 2


def test_events_are_due_at_the_end_of_a_tick() -> None:
    """Several events of one tick are due together, none before its own time."""
    assert due_times(400, 0.02, 100.0) == pytest.approx(
        [100.005] * 2 + [100.01] * 2 + [100.015] * 2 + [100.02] * 2
    )
    assert due_times(100, 0.03, 0.0) == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize("number", [0, 7, 123_456_789])
@pytest.mark.parametrize("size_bytes", [64, 400])
def test_payload_is_json_of_the_given_size(number: int, size_bytes: int) -> None:
    """Every number gives a different payload."""
    text = payload(number, size_bytes)
    assert (len(text.encode()), json.loads(text)["number"]) == (size_bytes, number)


def test_header() -> None:
    """A missing header is empty."""
    head = b"post /timed http/1.1\r\nhost: x\r\nwebhook-correlation-id: 12.5\r\ncontent-length: 400"
    assert (header(head, b"content-length"), header(head, b"webhook-correlation-id")) == (b"400", b"12.5")
    assert header(head, b"missing") == b""


async def test_receiver_process(tmp_path: Path) -> None:
    """It counts requests, logs the arrivals at /timed, and delays the answers of /slow."""
    certificate = LocalCertificate.in_folder(tmp_path)
    tls = ssl.create_default_context(cafile=certificate.certificate_file)
    files = (certificate.certificate_file, certificate.key_file)
    async with receiver_process(tmp_path, *files) as receiver, aiohttp.ClientSession() as session:
        position = await receiver.log_position()
        stamped = {"webhook-correlation-id": "12.5"}
        for path, headers in (("/now", {}), ("/timed/1", stamped), ("/timed", {}), ("/slow/1", {})):
            async with session.post(receiver.url(path), data=b"{}", headers=headers, ssl=tls) as answer:
                assert answer.status == 200
        assert await receiver.requests() == 4
        async with asyncio.timeout(10):
            arrivals = await receiver.until_arrived(2, position)
    assert [arrival.stamp for arrival in arrivals] == ["12.5", ""]


async def test_child_that_fails_is_explained(tmp_path: Path) -> None:
    """With the last line of its log."""
    with pytest.raises(ChildFailed, match=r"ended: .*No module named nothing_here"):
        async with start_child(python_module("nothing_here"), tmp_path):
            pass


def test_machine_is_named() -> None:
    """Or reported as unknown."""
    assert processor_model("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n") == "AMD EPYC"
    assert processor_model("") == ""
    assert system_name('NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12"\n') == "Debian GNU/Linux 12"
    assert system_name("") == "an unknown system"
