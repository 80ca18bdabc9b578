"""Unusual but valid JSON payloads, and invalid request bodies."""

import asyncio
from random import Random

from tests.faults.bed import EVENT_TYPES, Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import verb

# Valid JSON, so it is delivered byte for byte.
PAYLOADS = {
    "deep": "[" * 400 + "]" * 400,
    "long number": "1" * 2000,
    "tiny number": "1e-400",
    "NUL": '"a\\u0000b"',
    "duplicate key": '{"a": 1, "a": 2}',
    "not ASCII": '{"é🎉": "\u2028\u202e"}',
    "spaces": " [ 1 ,\n\t2 ] ",
    "empty string": '""',
    "null": "null",
    "half a mebibyte": f'"{"x" * 524288}"',
}
# Invalid: rejected, and nothing is stored.
BODIES = {
    "nothing": b"",
    "not JSON": b"\x00\xff\xfe",
    "half an event": b'{"event_type": "order.n0", "payload": ',
    "too deep": b'{"event_type": "order.n0", "payload": ' + b"[" * 100_000,
    "not UTF-8": b'{"event_type": "order.n0", "payload": "\xff"}',
    "lone surrogate": b'{"event_type": "order.n0", "payload": "\\ud800"}',
    "not a number": b'{"event_type": "order.n0", "payload": NaN}',
    "invalid event type": b'{"event_type": "a\\u0000b", "payload": 1}',
    "invalid event in a batch": b'{"events": [{"event_type": "order.n0", "payload": 1}, {"event_type": ""}]}',
}
CLIENT_ERRORS = range(400, 500)


@verb
async def publish_poison(bed: Bed, *, payload: str, number: int) -> None:
    """Publish an unusual payload, which must be accepted; an invariant checks that it arrives unchanged.

    Its event type also has a failing subscription, so the payload is also stored in a dead letter.
    """
    key, text = f"poison-{number}", PAYLOADS[payload]
    body = f'{{"event_type": "{EVENT_TYPES[0]}", "idempotency_key": "{key}", "payload": {text}}}'
    daemon = bed.running[number % len(bed.running)].daemon
    status, answer = await asyncio.to_thread(daemon.post, "/v1/events", body.encode())
    if status != 202:
        bed.problems.append(f"{payload}: {status} {answer}")
        return
    bed.publisher.accepted_events[key] = (answer["id"], text.strip())
    bed.effects["poison_accepted"] += 1


@verb
async def send_invalid_body(bed: Bed, *, body: str, instance: int) -> None:
    """Send an invalid body, which must be rejected with a reason."""
    daemon = bed.instances[instance].daemon
    path = "/v1/events/batch" if "batch" in body else "/v1/events"
    status, answer = await asyncio.to_thread(daemon.post, path, BODIES[body])
    if status not in CLIENT_ERRORS:
        bed.problems.append(f"{body}: {status} {answer}")
    bed.effects["invalid_bodies_rejected"] += 1


def send_poison(random: Random, rounds: int) -> list[Action]:
    """Send all payloads and bodies, in random order."""
    actions: list[Action] = []
    for number in range(rounds):
        kinds = [
            fault("publish_poison", payload=payload, number=number * 100 + place)
            for place, payload in enumerate(PAYLOADS)
        ]
        kinds += [fault("send_invalid_body", body=body, instance=random.randrange(3)) for body in BODIES]
        for action in random.sample(kinds, len(kinds)):
            actions += [action, act("accepted", more=random.randint(1, 30))]
    return actions


SCENARIOS = (
    Scenario(
        "poison",
        "unusual JSON payloads, and invalid request bodies",
        "valid JSON is delivered byte for byte, everything else is rejected with a reason",
        send_poison,
        effects=("poison_accepted", "invalid_bodies_rejected"),
        rounds=3,
    ),
)
