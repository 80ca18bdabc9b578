"""Runs inside a daemon under test, before its code: sets its clock ten minutes ahead of the database's."""

import time

AHEAD_SECONDS = 600

_time, _time_ns = time.time, time.time_ns

time.time = lambda: _time() + AHEAD_SECONDS
time.time_ns = lambda: _time_ns() + AHEAD_SECONDS * 10**9
