"""Creates and changes tenants. Calls schema/deliveries/subscriptions.sql."""

from collections.abc import Mapping
from typing import Any

import msgspec

from webhookd.db.connection import Connection


async def put(connection: Connection, tenant: str, changes: Mapping[str, Any]) -> bool:
    """Create a tenant, or change the given fields. Returns whether it was created."""
    changed = msgspec.json.encode(changes).decode()
    created: bool = await connection.fetchval("select webhookd.put_tenant($1, $2)", tenant, changed)
    return created
