"""Field types with their limits, descriptions and examples. Requests and responses are built from them."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Meta

from webhookd.core import limits

EventType: TypeAlias = Annotated[
    str,
    Meta(max_length=limits.MAX_EVENT_TYPE_CHARACTERS, pattern=limits.EVENT_TYPE, examples=["order.created"]),
]
EventPattern: TypeAlias = Annotated[
    str,
    Meta(max_length=limits.MAX_EVENT_TYPE_CHARACTERS, pattern=limits.EVENT_PATTERN, examples=["order.*"]),
]
EventTypes: TypeAlias = Annotated[
    list[EventPattern],
    Meta(
        min_length=1,
        max_length=limits.MAX_EVENT_TYPES,
        description="event types, or patterns: `order.*` is every type that begins with `order.`, `*` is "
        "every type",
        examples=[["order.created", "invoice.*"]],
    ),
]
Tenant: TypeAlias = Annotated[
    str,
    Meta(
        max_length=limits.MAX_TENANT_CHARACTERS,
        pattern=limits.TENANT,
        examples=["acme"],
        description="a customer of yours. Its events reach only its own subscriptions",
    ),
]
# Of a row that has no tenant, it is the empty text.
TenantOrNone: TypeAlias = Annotated[
    str, Meta(max_length=limits.MAX_TENANT_CHARACTERS, examples=["acme"], description="empty: no tenant")
]
_LabelText: TypeAlias = Annotated[str, Meta(max_length=limits.MAX_LABEL_CHARACTERS, pattern=limits.FREE_TEXT)]
Labels: TypeAlias = Annotated[
    dict[Annotated[_LabelText, Meta(min_length=1)], _LabelText],
    Meta(
        max_length=limits.MAX_LABELS,
        examples=[{"region": "eu"}],
        description="texts that filters of subscriptions, and searches, can ask for",
    ),
]
Filter: TypeAlias = Annotated[
    dict[Annotated[_LabelText, Meta(min_length=1)], _LabelText],
    Meta(
        max_length=limits.MAX_LABELS,
        examples=[{"region": "eu"}],
        description="only events that have all these labels are routed",
    ),
]
IdempotencyKey: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.MAX_KEY_CHARACTERS,
        pattern=limits.LABEL,
        examples=["order-7-created"],
        description="a key stores one event of a tenant, however often it is sent",
    ),
]
# The same key in a header, which reliably carries only visible ASCII.
KeyHeader: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.MAX_KEY_CHARACTERS,
        pattern=r"^[!-~]([ -~]*[!-~])?\Z",
        examples=["order-7-created"],
        description="the same as idempotency_key in the body",
    ),
]
CorrelationId: TypeAlias = Annotated[
    str,
    Meta(
        max_length=limits.MAX_KEY_CHARACTERS,
        pattern=limits.HEADER_TEXT,
        examples=["trace-4bf92f"],
        description="sent with each delivery, and written to the log lines about its results",
    ),
]
Attempts: TypeAlias = Annotated[int, Meta(ge=limits.MIN_ATTEMPTS, le=limits.MAX_ATTEMPTS, examples=[5])]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_DELAY_SECONDS, examples=[30.0])]
Jitter: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JITTER, examples=[0.0])]
Days: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_DAYS, examples=[30.0])]
OwnAttempts: TypeAlias = Annotated[
    Attempts | None,
    Meta(description="maximum number of attempts, including the first; null: the value in the configuration"),
]
OwnDelay: TypeAlias = Annotated[
    Delay | None,
    Meta(
        description="delay before the first retry, doubled for each further one; null: the value in the "
        "configuration"
    ),
]
Description: TypeAlias = Annotated[
    str,
    Meta(
        max_length=limits.MAX_DESCRIPTION_CHARACTERS,
        pattern=limits.FREE_TEXT,
        examples=["The shop's warehouse"],
    ),
]
HoldReason: TypeAlias = Literal["deleted", "disabled", "unverified", "paused", "tenant_inactive"]
Id: TypeAlias = Annotated[int, Meta(ge=1, le=limits.MAX_ID, examples=[42])]
Cursor: TypeAlias = Annotated[
    Id | None, Meta(description="cursor of the next page; null: this is the last page")
]
Uuid: TypeAlias = Annotated[UUID, Meta(examples=["0b9c2240-6f0e-4d3c-9b1a-5cbe0d3b6262"])]
ErrorCode: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.MAX_ERROR_CODE_CHARACTERS,
        examples=["HTTP_503"],
        description="HTTP_<status>, TIMEOUT, CONNECT_FAILED, DNS_FAILED, TLS_FAILED, ADDRESS_BLOCKED, "
        "PROTOCOL_ERROR, LEASE_EXPIRED or INTERNAL",
    ),
]
Time: TypeAlias = Annotated[datetime, Meta(tz=True, examples=["2026-03-01T12:00:00.25Z"])]
Sentence: TypeAlias = Annotated[
    str,
    Meta(
        examples=["Failed with HTTP_503. Attempt 4 of 5 is due at 2026-03-01T12:00:00Z."],
        description="the reason in words, for people",
    ),
]
Count: TypeAlias = Annotated[int, Meta(ge=0, examples=[3])]

# outbound/endpoint.py checks more than a pattern could, and returns a code for each
# problem. These types only document the fields.
CallbackUrl: TypeAlias = Annotated[
    str,
    Meta(
        description=f"https, with a public host and port 443 or {limits.LOWEST_UNPRIVILEGED_PORT} to "
        f"{limits.HIGHEST_PORT}; no user, no fragment",
        examples=["https://receiver.example/hook"],
        extra_json_schema={"format": "uri", "maxLength": limits.MAX_URL_CHARACTERS},
    ),
]
CustomHeaders: TypeAlias = Annotated[
    dict[str, str],
    Meta(
        description="sent with every delivery, and never shown again. Values are visible ASCII. Names that "
        "frame or route a request, and webhookd's own names, are rejected",
        examples=[{"X-Api-Key": "of-your-endpoint"}],
        extra_json_schema={
            "maxProperties": limits.MAX_HEADERS,
            "additionalProperties": {"type": "string", "maxLength": limits.MAX_HEADER_VALUE_CHARACTERS},
        },
    ),
]
_JSON = Meta(description="any JSON, stored byte for byte", examples=[{"order": 7, "total": "19.90"}])
NewPayload: TypeAlias = Annotated[msgspec.Raw, _JSON]
Payload: TypeAlias = Annotated[Any, _JSON]
