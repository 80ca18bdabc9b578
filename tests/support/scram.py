"""What PostgreSQL stores of a password, made here so that one round of hashing is enough to check it.

A login of the tests is made thousands of times, and the 4,096 rounds that are usual were half of what each of
them cost the server (15 ms against 7.5 of a processor).
"""

import base64
import hashlib
import hmac
import secrets

ROUNDS = 1


def stored(password: str) -> str:
    """A SCRAM-SHA-256 secret as in pg_authid (RFC 5803): CREATE ROLE and initdb take it for a password."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ROUNDS)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    keys = f"{_text(hashlib.sha256(client_key).digest())}:{_text(server_key)}"
    return f"SCRAM-SHA-256${ROUNDS}:{_text(salt)}${keys}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
