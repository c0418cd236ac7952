"""Model downloads on the other nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.schema import ConfigError
from keel.trainer.placement import downloads
from keel.trainer.placement.downloads import STALL_TIMEOUT_S, DownloadProgress, follow

HOSTS = {"a": "one", "b": "two"}


class Nodes:
    """Two nodes with scripted progress, polled once per second."""

    def __init__(self, *looks: tuple[DownloadProgress, DownloadProgress]) -> None:
        self.now, self._looks = 0.0, list(looks)

    def look(self) -> dict[str, DownloadProgress]:
        seen = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return dict(zip(HOSTS, seen, strict=True))

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def follow(self) -> None:
        sizes = {"a": (4000, 0), "b": (4000, 3000)}
        follow("o/m", HOSTS, sizes, self.look, clock=lambda: self.now, pause=self.pause)


def test_waits_for_all_nodes() -> None:
    nodes = Nodes(
        (DownloadProgress(100, done=False), DownloadProgress(3000, done=False)),
        (DownloadProgress(2000, done=False), DownloadProgress(4000, done=True)),
        (DownloadProgress(4000, done=True), DownloadProgress(4000, done=True)),
    )
    nodes.follow()
    assert nodes.now == 2.0


def test_failed_download_names_its_node() -> None:
    broken = DownloadProgress(100, done=True, error="model 'o/m': its download broke off")
    with pytest.raises(ConfigError, match="node two"):
        Nodes((DownloadProgress(1, done=False), broken)).follow()


def test_stalled_download_times_out() -> None:
    nodes = Nodes((DownloadProgress(4000, done=True), DownloadProgress(3000, done=False)))
    with pytest.raises(RuntimeError, match="two"):
        nodes.follow()
    assert nodes.now == STALL_TIMEOUT_S + 1  # the first poll saw progress


def test_local_folder_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_other_nodes", lambda _: pytest.fail("asked"))
    for path in (str(tmp_path), "./here"):
        downloads.download_on_nodes(path, timeout_s=1)
