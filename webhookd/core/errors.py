"""Every error that webhookd raises on purpose. A failed delivery is not among them: it is a value.

WebhookdError
├── ConfigurationError          the configuration is invalid                              exit 78
├── DatabaseUnavailable         PostgreSQL cannot be reached, or rejects the login        exit 69
│   ├── DatabaseBusy            a lock timeout or a conflict with another transaction     exit 69
│   ├── DatabaseFull            its disk is full: it can read but not write               exit 69
│   └── EmbeddedError           the embedded PostgreSQL cannot be started                 exit 69
├── DatabaseFault               an unexpected error from PostgreSQL                       exit 1
├── CannotListen                the listening address cannot be used                      exit 1
├── SchemaProblem               the database schema does not match this version           exit 1
├── ServiceUnavailable          a command got no response, or 503, from the daemon        exit 69
├── RequestRefused              the daemon rejected a command's request                   exit 1
└── Refused                     an SQL function refused, and changed nothing              exit 1
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final


class WebhookdError(Exception):
    """An error with a one-line message for people. It needs no traceback."""

    exit_code: int = 1


class ConfigurationError(WebhookdError):
    """A file, an environment variable or an option is invalid."""

    exit_code = 78


class DatabaseUnavailable(WebhookdError):
    """There is no connection, or it was lost. The same call may succeed later."""

    exit_code = 69


class DatabaseBusy(DatabaseUnavailable):
    """Another transaction blocked this one, which changed nothing. The same call may succeed at once."""


class DatabaseFull(DatabaseUnavailable):
    """The disk is full. Reads still work, so a successful read does not mean that there is space again."""


class EmbeddedError(DatabaseUnavailable):
    """The embedded server failed, or its folder, user account or programs cannot be used."""


class DatabaseFault(WebhookdError):
    """An error that indicates a bug in webhookd or a changed database."""


class CannotListen(WebhookdError):
    """An address is in use, does not belong to this machine, or needs other rights."""


class SchemaProblem(WebhookdError):
    """The schema is missing, older, newer or modified, or this login cannot migrate it."""


class ServiceUnavailable(WebhookdError):
    """No daemon runs at the command's address, or it cannot respond now."""

    exit_code = 69


class RequestRefused(WebhookdError):
    """The daemon's `application/problem+json`. The message is its detail; `members` has its other fields."""

    def __init__(self, message: str, status: int, code: str, members: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status: Final = status
        self.code: Final = code
        self.members: Final = members


class Refusal(Enum):
    """Why an SQL function refused. The value is the SQLSTATE that the function raises."""

    INVALID_ARGUMENT = "WH400"
    ROLE_NOT_OURS = "WH403"  # migrating: another login created a role
    NOT_FOUND = "WH404"
    IDEMPOTENCY_CONFLICT = "WH409"  # the key was used with different content
    IMMUTABLE = "WH410"  # an event, or a row in a final state
    ILLEGAL_TRANSITION = "WH411"  # not a transition of the state machine
    SUBSCRIPTION_HELD = "WH412"  # not active and verified
    VERIFICATION_STALE = "WH413"  # a newer challenge exists, or the address changed
    WRONG_STATUS = "WH415"  # of the delivery: not finished, or not waiting for a retry
    LIMIT_REACHED = "WH414"  # the subscriptions of a tenant, or the unused links of a token
    BEING_ERASED = "WH416"  # the tenant
    PAYLOAD_REMOVED = "WH417"  # retention removed the payload, so the event cannot be sent again


class Refused(WebhookdError):
    """The refusal of an SQL function, with the function's message."""

    def __init__(
        self, refusal: Refusal, message: str, detail: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.refusal: Final = refusal
        self.detail: Final = detail
        self.hint: Final = hint
