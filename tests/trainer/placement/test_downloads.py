"""A hub's model on the further nodes of a cluster: fetched before anything starts there."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.schema import ConfigError
from keel.trainer.placement import downloads
from keel.trainer.placement.downloads import STALL_TIMEOUT_S, DownloadProgress, follow

HOSTS = {"a": "one", "b": "two"}


class Nodes:
    """Two of them; what they say at each look, a second apart."""

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


def test_it_ends_once_all_have_all_of_it() -> None:
    nodes = Nodes(
        (DownloadProgress(100, done=False), DownloadProgress(3000, done=False)),
        (DownloadProgress(2000, done=False), DownloadProgress(4000, done=True)),
        (DownloadProgress(4000, done=True), DownloadProgress(4000, done=True)),
    )
    nodes.follow()
    assert nodes.now == 2.0


def test_a_node_whose_download_breaks_off_is_named() -> None:
    broken = DownloadProgress(100, done=True, error="model 'o/m': its download broke off")
    with pytest.raises(ConfigError, match="node two"):
        Nodes((DownloadProgress(1, done=False), broken)).follow()


def test_a_node_on_which_nothing_comes_is_given_up() -> None:
    nodes = Nodes((DownloadProgress(4000, done=True), DownloadProgress(3000, done=False)))
    with pytest.raises(RuntimeError, match="two"):
        nodes.follow()
    assert nodes.now == STALL_TIMEOUT_S + 1  # the first look had more than there was before


def test_a_folder_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_other_nodes", lambda _: pytest.fail("asked"))
    for path in (str(tmp_path), "./here"):
        downloads.download_on_nodes(path, timeout_s=1)
