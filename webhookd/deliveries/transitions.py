"""What became of sagas, told to the operator: counted, and logged where it is no success."""

import logging
from collections import Counter
from collections.abc import Sequence

from webhookd.core.metrics import Metrics
from webhookd.core.states import SagaStatus
from webhookd.deliveries.sagas import Transition

log = logging.getLogger(__name__)


def record(transitions: Sequence[Transition], metrics: Metrics) -> None:
    """Count and log each."""
    for status, count in Counter(transition.status for transition in transitions).items():
        if status is None:
            metrics.results_refused.inc(count)
        else:
            metrics.transitions.labels(status.value).inc(count)
    for transition in transitions:
        if transition.status is None:
            log.error("a result cannot be applied: %s", transition.problem, extra=_fields(transition))
        elif transition.status is SagaStatus.DEAD_LETTERED:
            log.warning("delivery dead-lettered", extra=_fields(transition))
        elif transition.status is SagaStatus.PENDING_RETRY:
            log.info("delivery will be retried", extra=_fields(transition))


def _fields(transition: Transition) -> dict[str, object]:
    return {
        "saga_id": transition.saga_id,
        "job_id": transition.job_id,
        "event_id": transition.event_id,
        "subscription_id": transition.subscription_id,
        "error_code": transition.error_code,
        "attempt_count": transition.attempt_count,
        "next_attempt_at": transition.next_attempt_at.isoformat()
        if transition.status is SagaStatus.PENDING_RETRY
        else None,
        "dead_letter_id": transition.dead_letter_id,
        "correlation_id": transition.correlation_id,
    }
