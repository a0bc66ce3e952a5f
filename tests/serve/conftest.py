"""What all tests of servers share."""

import ssl

import certifi
import pytest


@pytest.fixture(scope="package", autouse=True)
def one_certificate(tmp_path_factory):
    """Clients read one certificate: all that httpx brings take 20 ms for each client, and these servers have none."""
    with open(certifi.where()) as file:
        first = file.read().partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield
