"""What a route is: a method, a path, the scope it needs, and who answers."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from aiohttp import web

from webhookd.config.settings import Scope

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """No scope: open to all."""

    method: str
    path: str
    scope: Scope | None
    handler: Handler
