"""Every range, length, pattern and forbidden key that settings, API, CLI and database share.

The database repeats these values in CHECK constraints and functions. tests/schema/test_limits.py tries each
limit at its boundary, in the API's types and in the database, so that the two cannot drift apart.
"""

# Patterns. \Z, because $ also matches before a final line end.
EVENT_TYPE = r"^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*\Z"
# A type, everything below a prefix (order.*), or everything (*).
EVENT_PATTERN = r"^([a-zA-Z0-9_]+\.)*([a-zA-Z0-9_]+|\*)\Z"
SECRET = r"^whsec_[A-Za-z0-9+/]*={0,2}\Z"  # noqa: S105  a pattern, not a secret
TENANT = r"^[A-Za-z0-9._:-]+\Z"
# A text that fits in one line of a log: no control character (the two ranges of [[:cntrl:]], in any locale)
# and no half of a surrogate pair.
LABEL = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z"
# Visible ASCII; spaces only inside. Safe in an HTTP header.
HEADER_TEXT = r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z"
# PostgreSQL stores no NUL character.
FREE_TEXT = r"^[^\x00]*\Z"
SHA256_HEX = r"^[0-9a-fA-F]{64}\Z"
# Scheme, host and port as browsers write them, and nothing that ends a directive of Content-Security-Policy.
ORIGIN = r"^https?://([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?\Z"
MAX_ORIGIN_CHARACTERS = 270  # a host name has at most 253
LISTEN_ADDRESS = r"(\[[0-9a-fA-F:]+\]|[^:\[\]]+):[0-9]{1,5}"

MAX_ID = 2**63 - 1  # bigint
MAX_ID_DIGITS = len(str(MAX_ID))
HIGHEST_PORT = 65_535
LOWEST_UNPRIVILEGED_PORT = 1024

ONE_DAY_SECONDS = 86_400
ONE_YEAR_SECONDS = 365 * ONE_DAY_SECONDS
TEN_YEARS_SECONDS = 10 * ONE_YEAR_SECONDS

# Events
MAX_EVENT_TYPE_CHARACTERS = 100
MAX_KEY_CHARACTERS = 255  # idempotency keys and correlation ids
MAX_TENANT_CHARACTERS = 100
MAX_TENANT_NAME_CHARACTERS = 200
MAX_SUBSCRIPTIONS = 2**31 - 1  # of a tenant
MAX_LABELS = 20
MAX_LABEL_CHARACTERS = 100  # of a name, and of a value
# The job queue publishes these event types itself; an application must not.
RESERVED_EVENT_TYPE_PREFIX = "dot.job."
MIN_PAYLOAD_LIMIT_BYTES = 1024
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_BATCH_EVENTS = 1000

# Subscriptions
MAX_EVENT_TYPES = 100
MAX_SECRET_CHARACTERS = 100
MAX_PER_SECOND = 1_000_000
MAX_URL_CHARACTERS = 500
MAX_DESCRIPTION_CHARACTERS = 500
MAX_HEADERS = 20
MAX_HEADER_VALUE_CHARACTERS = 4096
MAX_HEADERS_TOTAL_CHARACTERS = 16 * 1024

# Retries
MIN_ATTEMPTS = 1
MAX_ATTEMPTS = 1000
MAX_DELAY_SECONDS = ONE_YEAR_SECONDS
MAX_JITTER = 1
MAX_LEASE_RESETS = 1000
MAX_LEASE_SECONDS = ONE_DAY_SECONDS
MAX_ERROR_CODE_CHARACTERS = 100
# The part of an endpoint's response body that is stored with an attempt.
MAX_RESPONSE_EXCERPT_BYTES = 4096
MAX_RESPONSE_BYTES = 16 * 1024 * 1024

# Retention
MAX_DAYS = 36_500  # a hundred years

# The console
MAX_CONSOLE_NAME_CHARACTERS = 60
MAX_LOGO_BYTES = 256 * 1024
MAX_FRAME_ANCESTORS = 20
MIN_SESSION_SECONDS = 300  # a login link lives as long
MAX_SESSION_SECONDS = 30 * ONE_DAY_SECONDS
MIN_LINK_SECONDS = 60
MAX_LINK_SECONDS = 7 * ONE_DAY_SECONDS
MAX_LIVE_LINKS = 1000  # of a token, for a tenant

# Lists
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_LISTED_IDS = 100
ID_LIST = rf"^[0-9]{{1,{MAX_ID_DIGITS}}}(,[0-9]{{1,{MAX_ID_DIGITS}}}){{0,{MAX_LISTED_IDS - 1}}}\Z"
MAX_REQUEUE_LIMIT = 10_000
MAX_REPLAY_LIMIT = 10_000
MAX_STATS_DAYS = 31  # the longest period of a chart
MAX_STATS_SUBSCRIPTIONS = 100  # of one request
MAX_TENANT_STATS_SUBSCRIPTIONS = 1000  # added up for a chart of a tenant

# The daemon's own settings
MAX_COUNT = 100_000  # batch sizes, windows and concurrency
MAX_SECONDS = ONE_DAY_SECONDS  # timeouts and intervals
MIN_POOL_SIZE = 2
MAX_POOL_SIZE = 1000
MAX_TOKEN_NAME_CHARACTERS = 100

# The job queue
MAX_JOB_KIND_CHARACTERS = 100  # also of a job's event domain
MAX_NAME_CHARACTERS = 200  # lease holder, lease name, source system, generator, actor
MAX_REF_CHARACTERS = 2000  # a reference to something stored elsewhere
MAX_WORDS_CHARACTERS = 500  # a progress signal, or the reason of a cancellation
MIN_PRIORITY = -32_768
MAX_PRIORITY = 32_767
MAX_CLAIM_WAIT_SECONDS = 30
MAX_SAFE_PAYLOAD_BYTES = 16 * 1024
SAFE_PAYLOAD_FORBIDDEN_KEYS = (
    "body",
    "content",
    "raw",
    "vector",
    "embedding",
    "secret",
    "token",
    "password",
    "ssn",
    "personal_data",
)
MAX_LEASE_RECOVERIES = 1000
MAX_JOB_DELAY_SECONDS = TEN_YEARS_SECONDS
MAX_JOB_RETENTION_SECONDS = TEN_YEARS_SECONDS
