"""The tests' own endpoint: it leaves nothing behind."""

import gc
import socket
import ssl

from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint


def connected(endpoint: Endpoint) -> socket.socket:
    """A connection, without a word."""
    connection = socket.socket()
    connection.connect(("127.0.0.1", endpoint.port))
    return connection


def test_an_endpoint_may_end_amid_a_handshake(certificates: Certificates) -> None:
    """A connection that has yet to be greeted is closed too, and not left to whichever test comes next."""
    trust = ssl.create_default_context(cafile=certificates.ca_file)
    with Endpoint(certificates.good) as endpoint:
        silent = connected(endpoint)
        # They are accepted in their order: when the second was greeted, the first is waited for.
        with connected(endpoint) as second, trust.wrap_socket(second, server_hostname="127.0.0.1"):
            pass
    gc.collect()  # complains of what was not closed
    with silent:
        assert silent.recv(1) == b""
