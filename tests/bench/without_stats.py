"""Turns off the statistics in the database of a benchmark, to measure what they cost."""

WITHOUT_STATS = """
    create or replace function webhookd.count_attempts(
        subscription_ids bigint[], statuses webhookd.saga_status[], durations_ms integer[]) returns integer
    language plpgsql as 'begin return 0; end'
"""
