"""What all tests of rewards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_certificates() -> Iterator[None]:
    """The judges here speak no TLS, and reading a bundle takes longer than most tests of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", "/")
        yield
