"""Tells the stages of this process, through memory, what a request has made for them to do."""

from collections.abc import Iterable

from webhookd.hints import Hints
from webhookd.wakeups import Bells, Work


class Wake:
    """A hint: what is not told is found by polling."""

    def __init__(self, bells: Bells, hints: Hints) -> None:
        self._bells = bells
        self._hints = hints

    def sagas_of(self, subscription_ids: Iterable[int]) -> None:
        """These subscriptions may have something due."""
        self._hints.have_due(subscription_ids)
        self._bells.ring(Work.SAGAS, hinted=True)

    def job_moved(self) -> None:
        """A move of a job is an event, to be routed; other processes are told by the database."""
        self._bells.ring_here(Work.EVENTS)

    def jobs_switched(self) -> None:
        """Every instance: one that keeps the substrate looks rarely while it is off."""
        self._bells.ring(Work.EVENTS)
