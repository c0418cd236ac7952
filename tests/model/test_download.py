"""Downloads with the hub's client from a local hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, snapshot_download

from keel.configs.schema import ConfigError
from keel.model import download
from keel.model.download import download_of
from tests.model.hub import SHA, SIZES, Hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(download, "HfApi", lambda: HfApi(endpoint=address))
        monkeypatch.setattr(Hub, "requested", [])
        fetched = partial(snapshot_download, endpoint=address)
        monkeypatch.setattr(download, "snapshot_download", fetched)
        monkeypatch.setattr(download, "hub_answers", lambda: True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield tmp_path / "models--owner--model" / "blobs"
        server.shutdown()


def test_present_counts_partial_files(cache: Path) -> None:
    pending = download_of("owner/model")
    assert pending is not None and pending.total == 4000
    assert pending.present() == 0
    cache.mkdir(parents=True)
    (cache / "abc").write_bytes(b"x" * 3000)
    with (cache / "def.incomplete").open("wb") as file:
        file.truncate(1000)  # preallocated
    assert pending.present() == 3000
    (cache / "def.incomplete").write_bytes(b"x" * 1000)
    assert pending.present() == 4000
    assert download_of("owner/model") is None


def test_interrupted_downloads_resume(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = download_of("owner/model")
    assert pending is not None
    monkeypatch.setattr(Hub, "broken", "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match="owner/model"):
        pending.fetch()
    monkeypatch.setattr(Hub, "broken", "")
    Hub.requested.clear()
    pending.fetch()
    assert download_of("owner/model") is None
    snapshot = cache.parent / "snapshots" / SHA
    assert {path.name for path in snapshot.iterdir()} == {*SIZES} - {
        "original/consolidated.safetensors"
    }
    assert "original/consolidated.safetensors" not in Hub.requested
