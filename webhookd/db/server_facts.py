"""Facts about a server and a login: version, durability, free connections, missing privileges."""

from dataclasses import dataclass

from webhookd.db.connection import connected, fetch_one, is_pooled

# functions_missing: functions that webhookd_app may call and this login may not; 0 without the schema.
_QUERY = """
select
    current_setting('server_version') as version,
    current_user as login,
    current_setting('synchronous_commit') <> 'off' as commits_are_durable,
    current_setting('fsync')::boolean as survives_a_power_cut,
    current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer as connections,
    (select sum(numbackends) from pg_stat_database)::integer as connections_in_use,
    (select count(*)
     from pg_proc
     where pronamespace = to_regnamespace('webhookd')
       and has_function_privilege(to_regrole('webhookd_app'), oid, 'execute')
       and not has_function_privilege(oid, 'execute'))::integer as functions_missing
"""


@dataclass(frozen=True)
class Facts:
    """Properties of one server, as seen by one login."""

    version: str
    login: str
    pooled: bool
    commits_are_durable: bool
    survives_a_power_cut: bool
    connections: int  # for all clients, without those reserved for superusers
    connections_in_use: int
    functions_missing: int


async def fetch(dsn: str) -> Facts:
    """Query the server over a connection of its own."""
    async with connected(dsn) as connection:
        row = await fetch_one(connection, _QUERY)
        version = row["version"].split()[0]  # without the distribution's suffix
        return Facts(**dict(row) | {"version": version}, pooled=await is_pooled(connection))
