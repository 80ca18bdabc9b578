"""Fills a database with what the pages show, through a real daemon and its real HTTPS endpoints.

`fill_with_demo` makes some hours of ordinary work: healthy and failing endpoints, retries and dead letters.
`fill_with_hostile_data` puts what an attacker would send into every field that someone else controls. Both
return when nothing is left to do but the retries that wait for hours.
"""

import asyncio
import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.api import JSON, Client
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.names import Names
from tests.support.waiting import until
from webhookd.deliveries.stats import BOUNDS_MS

if TYPE_CHECKING:
    from tests.support.database import Connection as DatabaseConnection

# Names of the certificate of tests/support/certificates.py.
DOMAIN = "hooks.example"
DEMO_EVENTS = 240
DEMO_HOURS = 6
# Such a retry waits longer than any test.
LATER_SECONDS = 21_600.0
SETTLED = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (
            select from webhookd.webhook_delivery_sagas s
            join webhookd.subscriptions n on n.id = s.subscription_id
            where s.status in ('Pending', 'InProgress') and n.active and not n.paused
               or s.status = 'PendingRetry' and s.next_attempt_at < now() + interval '10 minutes')
"""
# As `bounds` of count_attempts() in schema/deliveries/orchestration.sql.
BOUNDS = [bound + 1 for bound in BOUNDS_MS]
# Spreads the events evenly over the last seconds, in the order of their ids. The triggers forbid this change.
SPREAD = """
    create temporary table shift as
    select id, now() - make_interval(secs => $1::float8 * newer / (total + 1)) - created_at as delta
    from (
        select id, created_at, row_number() over (order by id desc) as newer, count(*) over () as total
        from webhookd.events
    ) e
"""
SHIFTED = """
    set session_replication_role = replica;
    update webhookd.events e set created_at = created_at + delta from shift s where s.id = e.id;
    update webhookd.event_labels e set created_at = created_at + delta from shift s where s.id = e.event_id;
    update webhookd.webhook_delivery_sagas e
        set created_at = created_at + delta, updated_at = updated_at + delta,
            next_attempt_at = case when status = 'PendingRetry' then next_attempt_at
                else next_attempt_at + delta end
        from shift s where s.id = e.event_id;
    update webhookd.webhook_delivery_jobs e
        set attempt_at = attempt_at + delta, result_applied_at = result_applied_at + delta,
            created_at = e.created_at + delta, finished_at = finished_at + delta
        from shift s where s.id = e.event_id;
    update webhookd.dead_letters e set failed_at = failed_at + delta
        from webhookd.webhook_delivery_sagas d join shift s on s.id = d.event_id where d.id = e.saga_id;
    update webhookd.endpoint_health h
        set failing_since = j.first_failure_at, last_failure_at = j.last_failure_at
        from (
            select subscription_id, min(finished_at) as first_failure_at, max(finished_at) as last_failure_at
            from webhookd.webhook_delivery_jobs where error_code is not null group by 1
        ) j
        where j.subscription_id = h.subscription_id and h.failing_since is not null;
    delete from webhookd.delivery_stats;
    insert into webhookd.delivery_stats (
        subscription_id, minute, writer, delivered, failed, dead_lettered, durations)
    select coalesce(a.subscription_id, 0), a.minute, 0, count(*) filter (where a.status = 'Completed'),
        count(*) filter (where a.status = 'Failed'), count(*) filter (where a.status is null),
        array[{counts}]
    from (
        select subscription_id, date_trunc('minute', result_applied_at) as minute, status::text, duration_ms
        from webhookd.webhook_delivery_jobs where result_applied_at is not null
        union all
        select subscription_id, date_trunc('minute', failed_at), null, null from webhookd.dead_letters
    ) a
    group by grouping sets ((a.subscription_id, a.minute), (a.minute));
    set session_replication_role = origin;
    drop table shift;
""".format(
    counts=", ".join(
        f"count(*) filter (where width_bucket(a.duration_ms, array{list(BOUNDS)}) = {place})"
        for place in range(len(BOUNDS) + 1)
    )
)

SCRIPT = "<script>document.title='owned'</script>"
QUOTES = "\"'><img src=x onerror=document.title='owned'>&lt;b&amp;"
TEMPLATE = "{{ 7 * 7 }}{% raw %}${7*7}<!-- ]]> -->"
ANSI = "\x1b[31mred\x1b[0m\x1b]0;owned\x07\x08\r\n"
BIDI = "\u202egpj.exe\u202c \u2066isolated\u2069 \u200f\u200b\ufeff"
RTL = "مرحبا بالعالم שלום עולם"
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈🇹🇼e\u0301" + "z\u0335\u0336\u0337\u0338" * 5
LONG_WORD = "Donaudampfschifffahrtsgesellschaft" * 6
HOSTILE_TEXTS = (SCRIPT, QUOTES, TEMPLATE, BIDI, RTL, EMOJI, LONG_WORD)
HOSTILE_BODY = f"{SCRIPT}{QUOTES}\x00{ANSI}{BIDI}{RTL}{EMOJI}{LONG_WORD}".encode() + b"\xff\xfe\x80"
MEBIBYTE = 1024 * 1024


@dataclass
class Filled:
    """The ids of what was made, by name. The names of endpoints and events say what is special about them."""

    tenants: list[str] = field(default_factory=list)
    endpoints: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoEndpoint:
    """An endpoint of the demo, and what it answers."""

    name: str
    tenant: str | None
    event_types: tuple[str, ...]
    description: str
    status: int = 200
    body: bytes = b'{"ok": true}'
    fails_every: int = 0  # every nth request gets 503 instead
    fields: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = True

    @property
    def path(self) -> str:
        return f"/{self.name}"


DEMO_TENANTS = {"acme": "Acme Ltd", "globex": "Globex GmbH", "initech": "Initech, Inc."}
DEMO_ENDPOINTS = (
    DemoEndpoint("orders", "acme", ("order.*",), "Order service"),
    DemoEndpoint("accounting", "acme", ("invoice.*", "payment.*"), "Accounting export", fails_every=9),
    DemoEndpoint(
        "staging",
        "acme",
        ("order.created",),
        "Staging, paused until the next release",
        fields={"paused": True},
    ),
    DemoEndpoint(
        "warehouse",
        "globex",
        ("shipment.*",),
        "Warehouse in Hamburg: EU shipments only",
        fields={"filter": {"region": "eu"}, "max_per_second": 50.0},
    ),
    DemoEndpoint(
        "crm",
        "globex",
        ("customer.*",),
        "CRM synchronisation",
        status=503,
        body=b"<html><body><h1>503 Service Unavailable</h1>upstream connect error</body></html>",
        fields={"base_delay_seconds": LATER_SECONDS, "max_attempts": 8},
    ),
    DemoEndpoint(
        "billing",
        "initech",
        ("invoice.*",),
        "Old billing system",
        status=404,
        body=b'{"error": "no such route: /billing", "trace": "7f3a90"}',
        fields={"max_attempts": 2},
    ),
    DemoEndpoint("risk", "initech", ("payment.*",), "Fraud check", fails_every=4),
    DemoEndpoint("analytics", "initech", ("*",), "Analytics, all events", fields={"format": "standard"}),
    DemoEndpoint("mobile", "globex", ("order.*",), "Push notifications, not verified yet", verified=False),
)
DEMO_TYPES = {
    "order.created": 5,
    "order.paid": 4,
    "order.cancelled": 1,
    "invoice.issued": 3,
    "payment.captured": 3,
    "payment.refunded": 1,
    "shipment.dispatched": 3,
    "customer.updated": 1,
}


def demo_names(names: Names) -> Names:
    """Let every host of the demo resolve to this machine, for a daemon with this environment."""
    for tenant in ("public", *DEMO_TENANTS):
        names.answer(f"{tenant}.{DOMAIN}", "127.0.0.1")
    return names


async def fill_with_demo(
    api: Client, superuser: "DatabaseConnection", endpoint: Endpoint, events: int = DEMO_EVENTS
) -> Filled:
    """Publish events over all tenants, deliver them, and spread them over the last hours.

    The daemon needs the environment of `demo_names`. The same events are published every time.
    """
    filled = Filled(list(DEMO_TENANTS))
    for tenant, name in DEMO_TENANTS.items():
        assert (await api.request("PUT", f"/v1/tenants/{tenant}", json={"name": name})).status in {200, 201}
    for made in DEMO_ENDPOINTS:
        filled.endpoints[made.name] = await _subscribe_demo(api, endpoint, made)
        _behave(endpoint, made)
    chosen = random.Random(7)  # noqa: S311  the same events every time
    batch = [_demo_event(chosen, number) for number in range(events)]
    for start in range(0, events, 100):
        part = batch[start : start + 100]
        answer = await api.post("/v1/events/batch", {"events": part})
        assert answer.status == 202, answer
        for event, accepted in zip(part, answer.body["events"], strict=True):
            filled.events[event["idempotency_key"]] = accepted["id"]
    await until(superuser, SETTLED)
    await superuser.execute(SPREAD, DEMO_HOURS * 3600)
    await superuser.execute(SHIFTED)
    return filled


async def fill_with_hostile_data(api: Client, superuser: "DatabaseConnection", endpoint: Endpoint) -> Filled:
    """Fill every field that a publisher, a subscriber or an endpoint controls with hostile values.

    There is one successful, one failed (a dead letter) and one waiting delivery for each event, and one event
    for each text. Not storable, and so absent: NUL and control characters in keys and labels.
    """
    filled = Filled()
    tenant = "t." + "a-very-long-tenant:" * 5
    filled.tenants.append(tenant[:100])
    await _ok(api.request("PUT", f"/v1/tenants/{tenant[:100]}", json={"name": f"{SCRIPT}{ANSI}{BIDI}{RTL}"}))
    event_type = "hostile." + "x" * 92
    headers = {"X-Script": SCRIPT + QUOTES, "X-Long": "h" * 4096, "X-" + "Name" * 15: "~" * 4096}
    descriptions = {"good": f"{SCRIPT}{QUOTES}{ANSI}{BIDI}", "bad": f"{RTL} {EMOJI}", "late": LONG_WORD}
    for name, description in descriptions.items():
        url = endpoint.url(f"/{name}?q='onmouseover=alert(1)&x=%3Cscript%3E&")
        path = (url + "long-" * 100)[:500]
        retry: dict[str, Any] = (
            {"max_attempts": 1} if name == "bad" else {"base_delay_seconds": LATER_SECONDS}
        )
        fields: dict[str, Any] = {"headers": headers, "tenant": filled.tenants[0], **retry}
        filled.endpoints[name] = await _subscribe(
            api, endpoint, path, [event_type, "*"], description=description[:500], **fields
        )
        status = 200 if name == "good" else 500
        endpoint.answer(status, HOSTILE_BODY, path="/" + path.split("/", 3)[3])
    for number, text in enumerate(HOSTILE_TEXTS):
        visible = "".join(letter for letter in text if "!" <= letter <= "~") or "trace"
        event = {
            "event_type": event_type,
            "tenant": filled.tenants[0],
            "payload": {text: [text, ANSI, "\x00", {"__proto__": None, "nested": [[[[text]]]]}], "n": 1e308},
            "idempotency_key": f"{text}{number}"[:255],
            "correlation_id": visible[:255],
            "labels": {text[:100]: text[-100:], "long": "l" * 100},
        }
        accepted = await _ok(api.post("/v1/events", event))
        filled.events[text] = accepted["id"]
    large = json.dumps({"text": LONG_WORD})[:-2]
    body = f'{{"event_type": "{event_type}", "tenant": "{filled.tenants[0]}", "payload": '
    payload = large + "x" * (MEBIBYTE - len(large) - 2) + '"}'
    accepted = await _ok(
        api.request("POST", "/v1/events", data=io.BytesIO(f"{body}{payload}}}".encode()), headers=JSON)
    )
    filled.events["mebibyte"] = accepted["id"]
    await until(superuser, SETTLED)
    return filled


async def _ok(request: Any) -> Any:
    answer = await request
    assert answer.status < 300, answer
    return answer.body


async def _subscribe(
    api: Client, endpoint: Endpoint, url: str, event_types: list[str], *, verify: bool = True, **fields: Any
) -> int:
    """Create a subscription, answer its challenge, and return its id."""
    body = {"callback_url": url, "event_types": event_types, **fields}
    created = await _ok(api.post("/v1/subscriptions", body))
    if verify:
        path = "/" + url.split("/", 3)[3]
        endpoint.echo_challenge(path=path)
        await _ok(api.post(f"/v1/subscriptions/{created['id']}/verify"))
    return int(created["id"])


async def _subscribe_demo(api: Client, endpoint: Endpoint, made: DemoEndpoint) -> int:
    url = endpoint.url(made.path, f"{made.tenant or 'public'}.{DOMAIN}")
    fields = {"description": made.description, **made.fields}
    if made.tenant:
        fields["tenant"] = made.tenant
    return await _subscribe(api, endpoint, url, list(made.event_types), verify=made.verified, **fields)


def _behave(endpoint: Endpoint, made: DemoEndpoint) -> None:
    count = 0

    async def behaviour(_: Request, connection: Connection) -> bool:
        nonlocal count
        count += 1
        fails = made.fails_every and count % made.fails_every == 0
        status, body = (503, b"please try again later") if fails else (made.status, made.body)
        await asyncio.sleep(0.005 * (1 + count % 7))
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await connection.send(head.encode() + body)
        return True

    endpoint.behave(behaviour, made.path)


def _demo_event(chosen: random.Random, number: int) -> dict[str, Any]:
    [event_type] = chosen.choices(list(DEMO_TYPES), list(DEMO_TYPES.values()))
    tenant = {"customer": "globex", "shipment": "globex", "order": "acme"}.get(event_type.partition(".")[0])
    order = 10_000 + number
    return {
        "event_type": event_type,
        "tenant": tenant or chosen.choice(["acme", "initech"]),
        "payload": {
            "id": f"{event_type.partition('.')[0]}_{order}",
            "amount": {"value": chosen.randrange(500, 90_000) / 100, "currency": "EUR"},
            "customer": {"name": chosen.choice(["Ada Chen", "Bo Lindqvist", "María Núñez", "陳怡君"])},
            "items": [{"sku": f"SKU-{chosen.randrange(100, 999)}", "quantity": chosen.randrange(1, 5)}],
        },
        "idempotency_key": f"{event_type}-{order}",
        "correlation_id": f"checkout-{order:x}",
        "labels": {"region": chosen.choice(["eu", "eu", "us"]), "channel": chosen.choice(["web", "app"])},
    }
