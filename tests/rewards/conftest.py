"""Fixtures of the rewards tests."""

from collections.abc import Iterator

import pytest

from keel.rewards.sandbox.sandbox import IsolationError, Sandbox, open_sandbox
from tests.rewards.judge.judge_server import Server, good, running


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Set another service's key, and load no certificates, which takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "somebody else's")
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", "/")
        yield


@pytest.fixture(scope="session")
def box() -> Sandbox:
    """The sandbox of programs. Skips the test if this machine cannot isolate them."""
    try:
        return open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with running(good) as server:
        yield server


@pytest.fixture
def server(one_server: Server) -> Server:
    one_server.reset()
    one_server.behave = good
    return one_server
