"""A model is fetched, and how far that has come: the hub's own client, a hub that is here."""

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
        monkeypatch.setattr(Hub, "asked", [])
        fetched = partial(snapshot_download, endpoint=address)
        monkeypatch.setattr(download, "snapshot_download", fetched)
        monkeypatch.setattr(download, "hub_answers", lambda: True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield tmp_path / "models--owner--model" / "blobs"
        server.shutdown()


def test_bytes_are_counted_while_they_come(cache: Path) -> None:
    found = download_of("owner/model")
    assert found is not None and found.total == 4000
    assert found.present() == 0
    cache.mkdir(parents=True)
    (cache / "abc").write_bytes(b"x" * 3000)
    with (cache / "def.incomplete").open("wb") as file:
        file.truncate(1000)  # made long at once, and empty so far
    assert found.present() == 3000
    (cache / "def.incomplete").write_bytes(b"x" * 1000)
    assert found.present() == 4000
    assert download_of("owner/model") is None, "all of it is here"


def test_nothing_is_counted_where_nothing_is_known(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert download_of("owner/other") is None
    assert download_of(str(tmp_path)) is None
    monkeypatch.setattr(download, "hub_answers", lambda: False)
    assert download_of("owner/model") is None


def test_what_is_loaded_is_fetched_and_a_download_that_broke_off_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = download_of("owner/model")
    assert found is not None
    monkeypatch.setattr(Hub, "broken", "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"'owner/model': its download broke off .* goes on"):
        found.fetch()
    monkeypatch.setattr(Hub, "broken", "")
    Hub.asked.clear()
    found.fetch()
    assert download_of("owner/model") is None, "all of it is here"
    snapshot = cache.parent / "snapshots" / SHA
    assert {path.name for path in snapshot.iterdir()} == {*SIZES} - {
        "original/consolidated.safetensors"
    }
    assert "original/consolidated.safetensors" not in Hub.asked
