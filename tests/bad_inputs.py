"""The list of bad inputs, row by row: the tests that cover each, or the reason why webhookd differs.

The letters and numbers are those of the list from the planning of the project: A callback URLs, B bodies of
events, C parameters, tokens and protocol, D custom headers, F configuration, G commands.
(E, endpoint responses, is in tests/unit/outbound/test_client_responses.py and tests/flow/test_endpoints.py.)
A test is named by its file and function; a sentence that starts with "Differs:" says why there is none.
tests/test_bad_inputs.py checks that the rows are complete and that the tests exist.
"""

CLIENT_ADDRESSES = "tests/unit/outbound/test_client_addresses.py"
URLS = "tests/unit/outbound/test_urls.py::test_a_bad_url_is_refused_with_its_code"
LITERALS = "tests/unit/outbound/test_urls.py::test_a_literal_address_that_is_not_public_is_refused"
DIALLED = "tests/unit/outbound/test_client_addresses.py::test_a_blocked_literal_is_never_dialled"
API_URLS = "tests/flow/test_addresses.py::test_api_rejects_every_bad_url"
HEADERS = "tests/unit/outbound/test_headers.py::test_bad_headers_are_refused_with_their_code"
API_SUBSCRIPTIONS = (
    "tests/flow/api/test_subscriptions.py::test_invalid_urls_headers_and_policies_are_rejected"
)
NO_EVENT = "tests/flow/api/test_bodies.py::test_invalid_bodies_are_rejected"
LARGE = "tests/flow/api/test_bodies.py::test_body_size_limit"
ENCODED = "tests/flow/api/test_bodies.py::test_wrong_content_types_and_encodings_are_rejected"
KEPT = "tests/flow/api/test_events.py::test_any_json_is_stored_unchanged"
KEY = "tests/flow/api/test_events.py::test_idempotency_key_stores_one_event"
TOKENS = "tests/flow/api/test_tokens.py::test_invalid_tokens_get_401"
PARAMETERS = "tests/flow/api/test_protocol.py::test_invalid_ids_and_parameters"
CLI_MISTAKE = "tests/flow/cli/test_usage.py::test_usage_error_is_one_line"
AWAY = "tests/flow/api/test_database_away.py::test_requests_get_503_in_time_without_a_database"
BAD_FILE = "tests/flow/reload/test_bad_files.py::test_invalid_file_changes_nothing"
BAD_SETTING = "tests/flow/test_start.py::test_invalid_configuration"
NO_TENANTS = (
    "Differs: there are no tenants; a token has scopes, and the scope read allows reading everything."
)

BLOCKED_LITERAL = (LITERALS, API_URLS, DIALLED)
BAD_URL = (URLS, API_URLS)
BAD_HEADER = (HEADERS, API_SUBSCRIPTIONS)

ROWS: dict[str, tuple[str, ...]] = {
    "A1": BAD_URL,
    "A2": BAD_URL,
    "A3": BAD_URL,
    "A4": BAD_URL,
    "A5": BAD_URL,
    "A6": BAD_URL,
    "A8": BAD_URL,
    "A9": BLOCKED_LITERAL,
    "A10": BLOCKED_LITERAL,
    "A11": BLOCKED_LITERAL,
    "A13": BLOCKED_LITERAL,
    "A15": BLOCKED_LITERAL,
    "A16": (*BLOCKED_LITERAL, URLS),
    "A18": BLOCKED_LITERAL,
    "A19": BLOCKED_LITERAL,
    "A21": (
        *BAD_URL,
        *BLOCKED_LITERAL,
        "tests/unit/outbound/test_addresses.py::test_a21_an_address_with_a_zone_is_never_permitted",
    ),
    "A22": BLOCKED_LITERAL,
    "A23": BLOCKED_LITERAL,
    "A24": (
        *BAD_URL,
        "tests/unit/outbound/test_client_addresses.py::test_a_number_for_a_host_is_never_dialled",
    ),
    "A25": (
        *BAD_URL,
        CLIENT_ADDRESSES + "::test_a25_hexadecimal_host_is_blocked_by_its_address",
    ),
    "A29": (*BAD_URL, "tests/unit/outbound/test_urls.py::test_a_good_url_is_stored_in_one_form"),
    "A30": BAD_URL,
    "A31": (
        *BAD_URL,
        "tests/unit/outbound/test_client_addresses.py::test_a31_invalid_stored_url_is_an_outcome",
        "tests/unit/outbound/test_client_responses.py::test_a31_internal_error_is_an_outcome_and_is_logged",
    ),
    "A33": (*BAD_URL, "Differs: ports are 443 and 1024 to 65535, so 5432 and 6379 are ordinary ports."),
    "A34": BAD_URL,
    "A36": (*BAD_URL, "Differs: the limit is 500 characters, as in the table."),
    "A38": (
        CLIENT_ADDRESSES + "::test_a38_checked_address_is_the_dialled_address",
        "tests/flow/test_addresses.py::test_dns_rebinding_is_blocked",
    ),
    "A39": (
        "tests/unit/outbound/test_client_addresses.py::test_a39_only_permitted_addresses_of_a_mixed_answer_are_dialled",
    ),
    "A40": (
        "tests/unit/outbound/test_client_addresses.py::test_a_name_with_a_blocked_address_is_never_dialled",
    ),
    "A41": (
        "tests/unit/outbound/test_client_addresses.py::test_a41_at_most_four_addresses_are_tried",
        "tests/unit/outbound/test_client_addresses.py::test_a41_the_lookup_is_inside_the_deadline",
        "tests/flow/test_addresses.py::test_at_most_four_of_five_hundred_addresses_are_dialled",
        "tests/flow/test_addresses.py::test_unanswered_dns_lookup_times_out",
    ),
    "A42": (
        "tests/unit/outbound/test_client_addresses.py::test_a_name_without_an_address_fails_as_dns",
        "Differs: a name is not resolved when a subscription is created; verification comes later.",
    ),
    "A43": (
        CLIENT_ADDRESSES + "::test_a43_own_address_is_blocked_even_in_an_allowed_network",
        "tests/flow/test_addresses.py::test_daemon_does_not_dial_its_own_api",
    ),
    "A44": ("tests/flow/api/test_verification.py::test_verification_respects_blocked_addresses",),
    "A45": (
        "tests/flow/api/test_subscriptions.py::test_a45_two_subscriptions_may_share_an_address",
        "Differs: allowed; each subscription has its own secret and deliveries.",
    ),
    "B1": (LARGE,),
    "B2": ("tests/flow/api/test_bodies.py::test_too_large_content_length_is_rejected_before_the_body",),
    "B3": (LARGE, "tests/flow/api/test_bodies.py::test_b3_endless_body_is_rejected"),
    "B4": (ENCODED,),
    "B5": (ENCODED,),
    "B7": (ENCODED,),
    "B8": (NO_EVENT,),
    "B9": (NO_EVENT,),
    "B10": (KEPT, "Differs: a payload is any JSON text, stored byte for byte, escaped NUL included."),
    "B12": (NO_EVENT, KEPT, "Differs: 1e999 is valid JSON, and the numbers of a payload are not checked."),
    "B14": (KEPT, "Differs: 1e200000 is valid JSON, and the numbers of a payload are not checked."),
    "B15": (NO_EVENT,),
    "B17": ("tests/flow/api/test_events.py::test_event_is_accepted_and_delivered_byte_for_byte",),
    "B18": (NO_EVENT, KEPT, "Differs: a payload may be any JSON value; the body must be an object."),
    "B19": (NO_EVENT,),
    "B20": (KEY, "Differs: the signed id is the event's id, so a key may contain dots."),
    "B21": (KEY,),
    "B22": (KEY,),
    "B23": (NO_TENANTS,),
    "B24": ("tests/schema/test_publish.py::test_twenty_callers_at_once_make_one_event",),
    "B25": (
        AWAY,
        "tests/flow/test_database_faults.py::test_killed_database_server_loses_no_accepted_event",
    ),
    "B26": (
        NO_EVENT,
        PARAMETERS,
        "tests/flow/api/test_dead_letters.py::test_dead_letters_are_listed_and_requeued_by_filter",
        "Differs: an event's time comes from the database, and a time in the request is an unknown field.",
    ),
    "B27": (NO_EVENT,),
    "B29": ("tests/flow/api/test_batches.py::test_batch_has_at_most_1000_events",),
    "B30": (NO_TENANTS,),
    "C1": (TOKENS, "tests/flow/api/test_tokens.py::test_each_route_needs_its_scope"),
    "C2": (TOKENS,),
    "C3": ("tests/flow/reload/test_access.py::test_tokens_are_reloaded",),
    "C4": (TOKENS,),
    "C5": (NO_TENANTS,),
    "C7": (PARAMETERS, "tests/schema/test_pages.py::test_cursor_without_a_row_is_rejected"),
    "C8": (
        PARAMETERS,
        "tests/flow/api/test_protocol.py::test_invalid_http_gets_a_problem_and_is_closed",
        "Differs: ids are numbers, and a number with too many digits is an unknown id.",
    ),
    "C10": (PARAMETERS,),
    "C11": (
        API_SUBSCRIPTIONS,
        "tests/flow/api/test_subscriptions.py::test_patch_changes_only_the_given_fields",
    ),
    "C12": (API_SUBSCRIPTIONS,),
    "C14": ("tests/flow/api/test_dead_letters.py::test_requeue_for_a_held_subscription_is_rejected",),
    "C15": (
        "tests/flow/api/test_dead_letters.py::test_dead_letter_is_requeued_once",
        "tests/schema/test_saga_states.py::test_terminal_saga_is_immutable",
        "Differs: only a dead letter can be requeued, and a Completed delivery has none: 404.",
    ),
    "C16": ("tests/schema/test_subscriptions.py::test_at_most_four_secrets_sign",),
    "C17": (
        "tests/unit/test_server.py::test_headers_have_a_deadline",
        "tests/unit/test_server.py::test_body_has_a_deadline",
    ),
    "C19": ("tests/unit/test_server.py::test_connection_above_the_limit_closes_the_longest_idle",),
    "C20": (
        "tests/flow/api/test_protocol.py::test_unknown_routes_and_methods",
        "Differs: every response is JSON, whatever Accept says.",
    ),
    "C21": (
        "tests/flow/api/test_subscriptions.py::test_subscription_is_created_and_shown",
        "Differs: a secret is shown once, completely; of a token only the digest is stored.",
    ),
    "C22": (
        "tests/flow/api/test_tokens.py::test_without_tokens_other_origins_are_rejected",
        "tests/flow/api/test_console_links.py::test_host_header_is_not_the_address_of_a_link",
        "Differs: no decision depends on a client's address, so X-Forwarded-For is not read.",
    ),
    "C23": (AWAY,),
    "D1": (
        *BAD_HEADER,
        "tests/unit/outbound/test_client_responses.py::test_d1_header_with_line_end_is_an_outcome",
        "tests/flow/test_endpoints.py::test_headers_that_would_break_a_request_are_not_sent",
    ),
    "D2": BAD_HEADER,
    "D3": BAD_HEADER,
    "D4": BAD_HEADER,
    "D6": BAD_HEADER,
    "D7": BAD_HEADER,
    "D8": BAD_HEADER,
    "D10": BAD_HEADER,
    "D11": BAD_HEADER,
    "D12": (*BAD_HEADER, "tests/unit/outbound/test_headers.py::test_d12_the_total_counts_what_is_sent"),
    "D13": BAD_HEADER,
    "D16": (API_SUBSCRIPTIONS,),
    "F1": (
        BAD_FILE,
        BAD_SETTING,
        "tests/unit/test_config.py::test_invalid_toml_is_rejected",
        "tests/unit/test_config.py::test_byte_order_mark_is_rejected",
        "tests/unit/test_config.py::test_windows_line_ends_are_accepted",
        "tests/unit/test_config.py::test_named_file_must_exist",
        "tests/unit/test_config.py::test_file_is_optional",
    ),
    "F3": (
        BAD_FILE,
        BAD_SETTING,
        "tests/unit/test_config.py::test_f3_number_out_of_range_is_rejected",
        "tests/unit/test_console_settings.py::test_session_seconds_out_of_range",
        "tests/unit/test_console_settings.py::test_anything_else_is_rejected",
    ),
    "F4": (BAD_FILE, BAD_SETTING),
    "F5": (AWAY, "tests/flow/test_check.py::test_check_and_serve_print_the_same_warnings"),
    "F6": ("tests/flow/test_check.py::test_check_and_serve_print_the_same_warnings",),
    "F7": (
        "tests/unit/test_config.py::test_environment_overrides_the_file",
        "Differs: the environment wins over the file, and no command prints the configuration.",
    ),
    "F8": ("Differs: secrets are in a separate table and not encrypted yet, so there is no key.",),
    "F9": ("Differs: secrets are not encrypted yet, so no key can be unknown.",),
    "F11": (
        "tests/unit/outbound/test_client_responses.py::test_f11_a_proxy_in_the_environment_is_not_used",
        "tests/flow/test_addresses.py::test_proxy_and_netrc_of_the_environment_are_ignored",
    ),
    "F12": ("Differs: the unit sets the environment; a user who can set PYTHONPATH could replace webhookd.",),
    "F13": ("tests/unit/test_dsn.py::test_unencrypted_hosts",),
    "F15": (
        "tests/flow/reload/test_keys.py::test_changed_keys_that_need_a_restart_are_logged_and_not_applied",
        "Differs: database.dsn needs a restart, and a reload reports that.",
    ),
    "F16": (
        "tests/schema/test_orchestration.py::test_retry_is_due_after_its_delay",
        "tests/schema/test_publish.py::test_event_has_the_time_of_its_transaction",
        "Differs: schedules, leases and signatures use the database's clock, timeouts a monotonic clock.",
    ),
    "G1": ("tests/schema/test_migrate_command.py::test_unknown_word_is_a_usage_error", CLI_MISTAKE),
    "G2": ("tests/flow/cli/test_publish.py::test_invalid_payload_is_a_usage_error",),
    "G4": ("tests/flow/cli/test_dead_letters.py::test_requeue_by_filter",),
    "G5": (CLI_MISTAKE,),
    "G6": ("tests/flow/cli/test_tokens.py::test_token_as_an_argument_is_rejected",),
    "G8": (
        "tests/schema/test_migrate_command.py::test_interrupted_migration_changes_nothing",
        "tests/flow/cli/test_publish.py::test_interrupted_batch_prints_its_summary",
    ),
    "G9": (
        "tests/schema/test_migrate_command.py::test_closed_port_is_unavailable",
        "tests/schema/test_migrate_command.py::test_wrong_password_is_unavailable",
        "tests/schema/test_migrate_command.py::test_login_without_privileges_is_refused",
        "tests/flow/test_start.py::test_empty_database_is_rejected",
        "tests/flow/test_start.py::test_newer_schema_is_rejected",
        "tests/flow/test_check.py::test_login_without_privileges",
        "tests/flow/cli/test_status.py::test_missing_daemon_is_reported_in_one_line",
    ),
    "G11": ("Differs: root may run it, as in a container; the systemd unit uses a separate user.",),
    "G12": (
        "tests/flow/test_lifecycle.py::test_three_instances_share_the_work",
        "Differs: instances have no configurable names; each creates its own, with a random part.",
    ),
}
