"""Free request slots of a worker, in total and per subscription, and the payload memory they hold. Pure."""

from collections import Counter
from typing import NamedTuple

# A quarter of the slots is reserved for subscriptions with few requests: of these each subscription gets a
# sixteenth of its own limit. Without the reserve, four hanging endpoints with 64 of 200 slots each delayed
# all others by a whole timeout; with it, other events arrived within 0.3 s beside twelve hanging endpoints.
RESERVED_SHARE = 4
RESERVED_LIMIT_SHARE = 16

# Payload characters in memory: 400 slots of 8 MiB each would be too much.
MAX_PAYLOADS = 128 * 1024 * 1024
# For one subscription, so that large events to a hanging endpoint do not use up the total. Two claims may
# load 32 MiB each before this is checked again.
MAX_PAYLOADS_PER_SUBSCRIPTION = 32 * 1024 * 1024


class Room(NamedTuple):
    """What the next claim may take: in total, and per subscription less the slots it uses now."""

    wanted: int
    subscription_limit: int
    in_use: dict[int, int]
    only_reserved: bool  # only reserved slots are free

    @property
    def leaves_out(self) -> bool:
        """Whether some subscription gets no slot now and could get one when a slot is released."""
        return not self.wanted or any(count >= self.subscription_limit for count in self.in_use.values())


class Slots:
    """A request uses a slot from its claim to its end, and memory from when its payload is loaded."""

    def __init__(self) -> None:
        self._in_use: Counter[int] = Counter()
        self._payloads: Counter[int] = Counter()
        self._all_payloads = 0
        self.in_flight = 0

    def room(self, concurrency: int, subscription_concurrency: int) -> Room:
        """Return what may be claimed now. A subscription with too much payload in memory counts as full."""
        free = 0 if self._all_payloads >= MAX_PAYLOADS else max(0, concurrency - self.in_flight)
        reserved = concurrency // RESERVED_SHARE
        only_reserved = free <= reserved
        if only_reserved:
            wanted, limit = free, max(1, subscription_concurrency // RESERVED_LIMIT_SHARE)
        else:
            wanted, limit = free - reserved, subscription_concurrency
        in_use = {
            subscription_id: count
            if self._payloads[subscription_id] < MAX_PAYLOADS_PER_SUBSCRIPTION
            else limit
            for subscription_id, count in self._in_use.items()
        }
        return Room(wanted, limit, in_use, only_reserved)

    def take(self, subscription_id: int) -> None:
        self._in_use[subscription_id] += 1
        self.in_flight += 1

    def hold_payload(self, subscription_id: int, size: int) -> None:
        self._payloads[subscription_id] += size
        self._all_payloads += size

    def release(self, subscription_id: int, size: int = 0) -> None:
        """Free a slot and its payload. A subscription without slots is forgotten, so memory stays bounded."""
        self._in_use[subscription_id] -= 1
        self._payloads[subscription_id] -= size
        self._all_payloads -= size
        self.in_flight -= 1
        if not self._in_use[subscription_id]:
            del self._in_use[subscription_id]
            self._payloads.pop(subscription_id, None)
