"""Every error webhookd raises on purpose. A refused delivery is not among them: that is a value.

WebhookdError
├── ConfigurationError          the configuration cannot be used                          exit 78
├── DatabaseUnavailable         PostgreSQL does not answer, or not to us                  exit 69
│   ├── DatabaseBusy            a lock was not got in time, or a conflict                 exit 69
│   ├── DatabaseFull            no room on its disk: it answers, and stores nothing       exit 69
│   └── EmbeddedError           the PostgreSQL of our own cannot be started               exit 69
├── DatabaseFault               PostgreSQL said what it never should                      exit 1
├── CannotListen                an address to listen on cannot be had                     exit 1
├── SchemaProblem               the database's schema does not fit this webhookd          exit 1
├── ServiceUnavailable          a command got no answer, or 503, from a daemon            exit 69
├── RequestRefused              a daemon said no to a command, and why                    exit 1
└── Refused                     a gated function said no, and changed nothing             exit 1
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final


class WebhookdError(Exception):
    """An error with a message for a person: one line, no traceback needed."""

    exit_code: int = 1


class ConfigurationError(WebhookdError):
    """A file, an environment variable or an option cannot be used as it is."""

    exit_code = 78


class DatabaseUnavailable(WebhookdError):
    """No connection, or one that was lost: the same call may succeed later."""

    exit_code = 69


class DatabaseBusy(DatabaseUnavailable):
    """Another transaction was in the way; this one changed nothing, and the same call may succeed at once."""


class DatabaseFull(DatabaseUnavailable):
    """What reads is served all the same, so that an answer is no sign that it has room again."""


class EmbeddedError(DatabaseUnavailable):
    """The embedded server's folder, account or programs cannot be used, or it failed."""


class DatabaseFault(WebhookdError):
    """An error that no call of ours should meet."""


class CannotListen(WebhookdError):
    """An address is taken, not this machine's, or not for this user."""


class SchemaProblem(WebhookdError):
    """The schema is missing, older, newer, changed by hand, or cannot be migrated by this login."""


class ServiceUnavailable(WebhookdError):
    """No daemon where a command looked for one, or one that cannot answer now: it may later."""

    exit_code = 69


class RequestRefused(WebhookdError):
    """A daemon's `application/problem+json`, in its own words; `members` has what else it told."""

    def __init__(self, message: str, status: int, code: str, members: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status: Final = status
        self.code: Final = code
        self.members: Final = members


class Refusal(Enum):
    """Why a gated function refused. The value is the SQLSTATE that schema/ raises it with."""

    INVALID_ARGUMENT = "WH400"
    ROLE_NOT_OURS = "WH403"  # migrating: a role was made by another login
    NOT_FOUND = "WH404"
    IDEMPOTENCY_CONFLICT = "WH409"  # the key was used for other content
    IMMUTABLE = "WH410"  # a fact, or a row in its last state
    ILLEGAL_TRANSITION = "WH411"  # not an edge of the state machine
    SUBSCRIPTION_HELD = "WH412"  # not active and verified
    VERIFICATION_STALE = "WH413"  # the challenge or the address changed meanwhile


class Refused(WebhookdError):
    """A gated function's refusal, in its own words."""

    def __init__(
        self, refusal: Refusal, message: str, detail: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.refusal: Final = refusal
        self.detail: Final = detail
        self.hint: Final = hint
