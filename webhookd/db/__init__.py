"""The connection to PostgreSQL: pool, listener, migrations, keyset paging, error translation."""
