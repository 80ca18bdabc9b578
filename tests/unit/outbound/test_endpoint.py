"""The tests' own endpoint releases everything it opened."""

import gc
import socket
import ssl

from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint


def connected(endpoint: Endpoint) -> socket.socket:
    """Connect without sending anything."""
    connection = socket.socket()
    connection.connect(("127.0.0.1", endpoint.port))
    return connection


def test_stop_during_a_handshake_closes_the_connection(certificates: Certificates) -> None:
    """A connection before its handshake is closed too, and does not leak into the next test."""
    trust = ssl.create_default_context(cafile=certificates.ca_file)
    with Endpoint(certificates.good) as endpoint:
        silent = connected(endpoint)
        # Connections are accepted in order: after the second handshake, the endpoint waits for the first.
        with connected(endpoint) as second, trust.wrap_socket(second, server_hostname="127.0.0.1"):
            pass
    gc.collect()  # warns about unclosed sockets
    with silent:
        assert silent.recv(1) == b""
