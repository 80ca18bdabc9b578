"""Kinds of fields, each with its bounds and an example: what bodies, queries and answers are made of."""

from datetime import datetime
from typing import Annotated, Any, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Meta

from webhookd.core.limits import LABEL
from webhookd.outbound.headers import MAX_HEADERS, MAX_VALUE_LENGTH
from webhookd.outbound.urls import MAX_URL_LENGTH

MAX_ID = 2**63 - 1

# As the tables' checks say. \Z, for $ also matches before a line end.
EventType: TypeAlias = Annotated[
    str,
    Meta(max_length=100, pattern=r"^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*\Z", examples=["order.created"]),
]
IdempotencyKey: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=LABEL,
        examples=["order-7-created"],
        description="there is one event for a key, however often it is sent",
    ),
]
# The document's words for the same key in a header, which carries no other characters without doubt.
KeyHeader: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        pattern=r"^[!-~]([ -~]*[!-~])?\Z",
        examples=["order-7-created"],
        description="the same as idempotency_key in the body",
    ),
]
CorrelationId: TypeAlias = Annotated[
    str,
    Meta(
        max_length=255,
        pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z",
        examples=["trace-4bf92f"],
        description="sent with each delivery, and in every line of the log about one",
    ),
]
Attempts: TypeAlias = Annotated[int, Meta(ge=1, le=1000, examples=[5])]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=31_536_000, examples=[30.0])]
OwnAttempts: TypeAlias = Annotated[
    Attempts | None, Meta(description="attempts in all, the first included; null: the configuration's")
]
OwnDelay: TypeAlias = Annotated[
    Delay | None, Meta(description="before the first retry, doubled for each; null: the configuration's")
]
Description: TypeAlias = Annotated[
    str, Meta(max_length=500, pattern=r"^[^\x00]*\Z", examples=["The shop's warehouse"])
]
Id: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ID, examples=[42])]
Uuid: TypeAlias = Annotated[UUID, Meta(examples=["0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"])]
ErrorCode: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=100,
        examples=["HTTP_503"],
        description="HTTP_<status>, TIMEOUT, CONNECT_FAILED, DNS_FAILED, TLS_FAILED, ADDRESS_BLOCKED, "
        "PROTOCOL_ERROR, LEASE_EXPIRED or INTERNAL",
    ),
]
Time: TypeAlias = Annotated[datetime, Meta(tz=True, examples=["2026-03-01T12:00:00.25Z"])]
Sentence: TypeAlias = Annotated[
    str,
    Meta(
        examples=["Failed with HTTP_503: attempt 4 of 5 is due at 2026-03-01T12:00:00Z."],
        description="the same for a person",
    ),
]
Count: TypeAlias = Annotated[int, Meta(ge=0, examples=[3])]

# Their own checks say more than a pattern could, each with a code of its own (outbound/urls.py, headers.py):
# here are only words for the document.
CallbackUrl: TypeAlias = Annotated[
    str,
    Meta(
        description="https, with a public host and the port 443 or 1024 to 65535; no user, no fragment",
        examples=["https://receiver.example/hook"],
        extra_json_schema={"format": "uri", "maxLength": MAX_URL_LENGTH},
    ),
]
CustomHeaders: TypeAlias = Annotated[
    dict[str, str],
    Meta(
        description="sent with every delivery; never shown again. Values are visible ASCII; names that "
        "frame or route a request, or are webhookd's own, are refused",
        examples=[{"X-Api-Key": "of-your-endpoint"}],
        extra_json_schema={
            "maxProperties": MAX_HEADERS,
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_LENGTH},
        },
    ),
]
_JSON = Meta(description="any JSON, kept byte for byte", examples=[{"order": 7, "total": "19.90"}])
NewPayload: TypeAlias = Annotated[msgspec.Raw, _JSON]
Payload: TypeAlias = Annotated[Any, _JSON]
