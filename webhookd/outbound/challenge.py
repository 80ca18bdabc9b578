"""The challenge's message, as the daemon sends it and a receiver reads it. Pure."""

import msgspec

EVENT_TYPE = "webhookd.verification"


class ChallengeMessage(msgspec.Struct, tag_field="type", tag=EVENT_TYPE):
    """`{"type": "webhookd.verification", "challenge": "…"}`, to be answered with the challenge."""

    challenge: str


def challenge_in(body: bytes) -> str | None:
    """The challenge of a message that is one."""
    try:
        return msgspec.json.decode(body, type=ChallengeMessage).challenge
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
