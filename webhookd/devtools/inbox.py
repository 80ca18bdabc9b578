"""What a receiver makes of a request: is it signed, was it here before, how is it answered. No network here.

As any receiver should: it believes nothing that is not signed, and answers the challenge.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from webhookd.outbound.signatures import SignatureProblem, challenge_in, verify

# Of the messages that came last; an older one that comes again is taken for new.
MAX_REMEMBERED = 10_000
SUCCESS = range(200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How to be a good receiver, or a bad one."""

    # The first so many attempts of each message fail.
    failures: int = 0
    # What a failure is answered with; without `failures`, everything is.
    status: int | None = None

    def status_of(self, attempt: int) -> int:
        """What the n-th request with the same id is answered with."""
        if attempt <= self.failures or (self.status is not None and not self.failures):
            return self.status or HTTPStatus.INTERNAL_SERVER_ERROR
        return HTTPStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request, and what was made of it."""

    received_at: datetime
    method: str
    path: str
    headers: Mapping[str, str]  # their names in lower case
    body: bytes
    # Whether there was a secret to verify it by, and if so, what is wrong with the signature.
    checked: bool
    problem: SignatureProblem | None
    # It was taken before: a receiver does nothing for it again.
    duplicate: bool
    status: int
    challenge: str | None = None

    @property
    def answer(self) -> bytes:
        """The body of the answer: a challenge is echoed."""
        return b"" if self.challenge is None else msgspec.json.encode({"challenge": self.challenge})

    @property
    def taken(self) -> bool:
        """Whether it counts as delivered."""
        return self.status in SUCCESS


@dataclass(slots=True)
class _Seen:
    requests: int = 0
    taken: bool = False


@dataclass(slots=True)
class Inbox:
    """Judges what arrives. `secrets` and `behaviour` may change meanwhile."""

    # Without, everything is taken as it comes. With, but no secret yet, nothing is.
    verifies: bool = True
    secrets: list[str] = field(default_factory=list)
    behaviour: Behaviour = field(default_factory=Behaviour)
    _seen: OrderedDict[str, _Seen] = field(default_factory=OrderedDict)

    def judge(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, received_at: datetime
    ) -> Arrival:
        """What becomes of a request."""
        problem = verify(self.secrets, headers, body, received_at.timestamp()) if self.verifies else None
        challenge, duplicate = None, False
        if method != "POST":
            status: int = HTTPStatus.METHOD_NOT_ALLOWED
        elif problem is not None:
            status = HTTPStatus.UNAUTHORIZED
        elif (challenge := challenge_in(body)) is not None:
            status = HTTPStatus.OK
        else:
            seen = self._remembered(headers.get("webhook-id", ""))
            seen.requests += 1
            duplicate = seen.taken
            status = self.behaviour.status_of(seen.requests)
            seen.taken |= status in SUCCESS
        return Arrival(
            received_at=received_at,
            method=method,
            path=path,
            headers=headers,
            body=body,
            checked=self.verifies,
            problem=problem,
            duplicate=duplicate,
            status=status,
            challenge=challenge,
        )

    def _remembered(self, message_id: str) -> _Seen:
        """What is known of this message. One without an id is new each time."""
        if not message_id:
            return _Seen()
        seen = self._seen.setdefault(message_id, _Seen())
        self._seen.move_to_end(message_id)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        return seen


def now() -> datetime:
    """The time of an arrival."""
    return datetime.now(UTC)
