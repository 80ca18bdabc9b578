"""Response types that every API shares: problems, pages and documents."""

from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from webhookd.core.states import WorkStatus
from webhookd.http.fields import Id, Uuid

Metrics: TypeAlias = Annotated[str, Meta(examples=["webhookd_events_accepted_total 3.0\n"])]
Document: TypeAlias = Annotated[dict[str, Any], Meta(examples=[{"openapi": "3.1.0"}])]
Html: TypeAlias = Annotated[str, Meta(examples=["<!doctype html>…"])]


class Problem(TypedDict):
    """What went wrong (RFC 9457). `code` is stable; the other words may change."""

    type: Annotated[str, Meta(examples=["urn:webhookd:problem:not_found"])]
    title: Annotated[str, Meta(examples=["Not found"])]
    status: Annotated[int, Meta(ge=400, le=599, examples=[404])]
    code: Annotated[str, Meta(examples=["not_found"])]
    detail: Annotated[str, Meta(examples=["no event 42"])]
    event_id: NotRequired[
        Annotated[Id, Meta(description="with idempotency_conflict: the event that has the key")]
    ]
    saga_id: NotRequired[Annotated[Id, Meta(description="with already_requeued: the delivery that there is")]]
    job_id: NotRequired[
        Annotated[Uuid, Meta(description="with idempotency_conflict, already_requeued: the job there is")]
    ]
    job_status: NotRequired[Annotated[WorkStatus, Meta(description="how the job stands")]]
    error_code: NotRequired[Annotated[str, Meta(description="with verification_failed: as a delivery's")]]
    response_status: NotRequired[
        Annotated[int | None, Meta(description="with verification_failed: what the endpoint answered")]
    ]
    duration_ms: NotRequired[Annotated[int | None, Meta(description="with verification_failed")]]
