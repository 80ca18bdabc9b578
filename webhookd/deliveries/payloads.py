"""What is to be sent for leases: loaded together, or one by one where one of them cannot be read."""

import logging

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.pool import Pool
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries.attempts import Delivery, Lease

log = logging.getLogger(__name__)

# By job; nothing for one that cannot be read. One that is in here not at all is to be handed back.
Loaded = dict[int, Delivery | None]


async def load(pool: Pool, leases: list[Lease]) -> Loaded:
    """Nothing is begun in here: whatever fails, also giving the connection back, may be done again.

    One that cannot be read, because its row is damaged say, is not let spoil it for the others.
    """
    try:
        return await _load_together(pool, leases)
    except DatabaseUnavailable:
        raise
    except Exception as error:
        log.warning("%d leases were not loaded, and will be one by one: %s", len(leases), error)
    loaded: Loaded = {}
    for lease in leases:
        try:
            loaded |= await _load_together(pool, [lease])
        except DatabaseUnavailable:
            raise
        except Exception:
            log.exception("a delivery could not be loaded", extra={"job_id": lease.job_id})
            loaded[lease.job_id] = None
    return loaded


async def _load_together(pool: Pool, leases: list[Lease]) -> Loaded:
    async with pool.connection() as connection:
        loaded = await jobs.load(connection, leases)
    return {delivery.job_id: delivery for delivery in loaded}
