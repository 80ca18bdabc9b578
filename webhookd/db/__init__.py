"""The connection to PostgreSQL: pool, migrations, keyset paging, error translation."""
