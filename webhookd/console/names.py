"""The endpoints that a list names, with one call of the API for all of them.

A template shows an endpoint with `parts.endpoint_name(names, id)`.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from webhookd.console.visits import Visit
from webhookd.core.limits import MAX_LISTED_IDS

# Subscriptions by id, as the API shows them. Deleted ones are missing.
Names: TypeAlias = dict[int, dict[str, Any]]


async def endpoint_names(visit: Visit, subscription_ids: Iterable[int]) -> Names:
    """Return the subscriptions with these ids, of at most MAX_LISTED_IDS rows of a list."""
    ids = sorted(set(subscription_ids))[:MAX_LISTED_IDS]
    if not ids:
        return {}
    found = await visit.get("/v1/subscriptions", limit=MAX_LISTED_IDS, ids=",".join(map(str, ids)))
    return {item["id"]: item for item in found["items"]}
