"""How far a download has come, by the hub's own client and a hub on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from keel.model import download
from keel.model.download import download_of

SIZES = {
    "model-00001-of-00002.safetensors": 3000,
    "model-00002-of-00002.safetensors": 1000,
    "original/consolidated.safetensors": 50_000,
    "tokenizer.json": 700,
}


class Hub(BaseHTTPRequestHandler):
    """Knows one model."""

    def do_GET(self) -> None:
        known = self.path.split("?")[0] == "/api/models/owner/model"
        files = [{"rfilename": name, "size": size} for name, size in SIZES.items()]
        body = json.dumps({"id": "owner/model", "siblings": files}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(download, "HfApi", lambda: HfApi(endpoint=address))
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
