"""How long a stage rests after a call that did little. Pure.

A call for one row costs the database nearly what one for ten does (1.0 ms against 1.6, measured of applying).
While a stage rests, more comes together: at 350 deliveries a second, which is a tenth of what a
machine can do, every stage called for two or three at a time, and half of the machine was busy with it.

The first call after a quiet time is never late for it. Not to be used where somebody waits for room that the
next call makes: see Hints.is_short_of_room. Where orchestration and delivery are in different instances none
of them knows that, and all rest.
"""

# A batch from which on there is no rest.
FEW = 100
# However long the database was stalled.
MAX_REST_SECONDS = 0.05


def rest_seconds(done: int, took_seconds: float) -> float:
    """As long as the call took, if it did something and that was little."""
    return min(took_seconds, MAX_REST_SECONDS) if 0 < done < FEW else 0.0
