"""/healthz, /readyz, /status and /metrics. None of them asks the database."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from webhookd.http import health_responses, responses
from webhookd.http.answers import HEADERS, answer
from webhookd.http.routes import OtherAnswer, Route

NOT_READY = OtherAnswer("Not ready, and why", {"ready": False, "because": ["the database does not answer"]})


class Health:
    """How this instance does."""

    def __init__(
        self,
        unready: Callable[[], list[str]],
        status: Callable[[], health_responses.Status],
        registry: CollectorRegistry,
    ) -> None:
        self._unready = unready
        self.status = status
        self._registry = registry

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/healthz",
                None,
                self._healthz,
                "Whether the process lives",
                health_responses.Alive,
                asks_database=False,
            ),
            Route(
                "GET",
                "/readyz",
                None,
                self._readyz,
                "Whether work sent here is done now",
                health_responses.Readiness,
                other_answers={503: NOT_READY},
                asks_database=False,
            ),
            Route(
                "GET",
                "/status",
                "read",
                self._get_status,
                "What an operator asks first",
                health_responses.Status,
                description="Asks nobody, so that it answers whatever else does not.",
                asks_database=False,
            ),
            Route(
                "GET",
                "/metrics",
                "read",
                self._metrics,
                "Metrics for Prometheus",
                responses.Metrics,
                media_type="text/plain",
                asks_database=False,
            ),
        ]

    async def _healthz(self, _: web.Request) -> web.Response:
        """The loop turns."""
        return answer(health_responses.Alive(alive=True))

    async def _readyz(self, _: web.Request) -> web.Response:
        reasons = self._unready()
        if reasons:
            return answer(health_responses.Readiness(ready=False, because=reasons), 503)
        return answer(health_responses.Readiness(ready=True))

    async def _get_status(self, _: web.Request) -> web.Response:
        return answer(self.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry),
            headers=HEADERS | {"Content-Type": "text/plain; version=0.0.4"},
        )
