"""The way to PostgreSQL, and the only package that imports asyncpg.

One module a noun, each a thin typed caller of its gated functions.
"""
