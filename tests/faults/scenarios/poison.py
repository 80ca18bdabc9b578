"""What should not be sent: payloads at the edge of JSON, and bodies beyond it."""

import asyncio
from random import Random

from tests.faults.bed import EVENT_TYPES, Bed
from tests.faults.plan import Action, Scenario, act, fault
from tests.faults.verbs import verb

# JSON, and so delivered byte for byte.
PAYLOADS = {
    "deep": "[" * 400 + "]" * 400,
    "long number": "1" * 2000,
    "tiny number": "1e-400",
    "NUL": '"a\\u0000b"',
    "a key twice": '{"a": 1, "a": 2}',
    "not ASCII": '{"é🎉": "\u2028\u202e"}',
    "spaces": " [ 1 ,\n\t2 ] ",
    "empty string": '""',
    "null": "null",
    "half a mebibyte": f'"{"x" * 524288}"',
}
# No event: refused, and nothing of it is kept.
BODIES = {
    "nothing": b"",
    "no JSON": b"\x00\xff\xfe",
    "half an event": b'{"event_type": "order.n0", "payload": ',
    "too deep": b'{"event_type": "order.n0", "payload": ' + b"[" * 100_000,
    "not UTF-8": b'{"event_type": "order.n0", "payload": "\xff"}',
    "lone surrogate": b'{"event_type": "order.n0", "payload": "\\ud800"}',
    "not a number": b'{"event_type": "order.n0", "payload": NaN}',
    "a type that is none": b'{"event_type": "a\\u0000b", "payload": 1}',
    "a batch of one bad": b'{"events": [{"event_type": "order.n0", "payload": 1}, {"event_type": ""}]}',
}
REFUSED = range(400, 500)


@verb
async def publish_poison(bed: Bed, *, payload: str, number: int) -> None:
    """A payload at the edge; it is accepted, and the invariants see that it arrives as it was.

    Of the type that has a dead letter too, whose snapshot is such a payload then.
    """
    key, text = f"poison-{number}", PAYLOADS[payload]
    body = f'{{"event_type": "{EVENT_TYPES[0]}", "idempotency_key": "{key}", "payload": {text}}}'
    daemon = bed.living[number % len(bed.living)].daemon
    status, told = await asyncio.to_thread(daemon.post, "/v1/events", body.encode())
    if status != 202:
        bed.problems.append(f"{payload}: {status} {told}")
        return
    bed.publisher.accepted_events[key] = (told["id"], text.strip())
    bed.effects["poison_accepted"] += 1


@verb
async def send_nonsense(bed: Bed, *, body: str, instance: int) -> None:
    """What is no event is refused, with a reason."""
    daemon = bed.instances[instance].daemon
    path = "/v1/events/batch" if "batch" in body else "/v1/events"
    status, told = await asyncio.to_thread(daemon.post, path, BODIES[body])
    if status not in REFUSED:
        bed.problems.append(f"{body}: {status} {told}")
    bed.effects["nonsense_refused"] += 1


def poisoning(random: Random, rounds: int) -> list[Action]:
    """All of them, in an order of the seed's."""
    actions: list[Action] = []
    for number in range(rounds):
        kinds = [
            fault("publish_poison", payload=payload, number=number * 100 + place)
            for place, payload in enumerate(PAYLOADS)
        ]
        kinds += [fault("send_nonsense", body=body, instance=random.randrange(3)) for body in BODIES]
        for action in random.sample(kinds, len(kinds)):
            actions += [action, act("accepted", more=random.randint(1, 30))]
    return actions


SCENARIOS = (
    Scenario(
        "poison",
        "payloads at the edge of JSON, and bodies that are no events",
        "what is JSON is delivered byte for byte, what is none is refused with a reason",
        poisoning,
        effects=("poison_accepted", "nonsense_refused"),
        rounds=3,
    ),
)
