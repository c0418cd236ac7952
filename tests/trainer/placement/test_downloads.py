"""A hub's model on the further nodes of a cluster: fetched before anything starts there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keel.configs.schema import ConfigError
from keel.trainer.placement import downloads
from keel.trainer.placement.downloads import STALLED_S, Fetcher, Progress, follow
from tests.waiting import wait_for

HOSTS = {"a": "one", "b": "two"}


class Nodes:
    """Two of them; what they say at each look, a second apart."""

    def __init__(self, *looks: tuple[Progress, Progress]) -> None:
        self.now, self._looks = 0.0, list(looks)

    def look(self) -> dict[str, Progress]:
        seen = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return dict(zip(HOSTS, seen, strict=True))

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def follow(self) -> None:
        sizes = {"a": (4000, 0), "b": (4000, 3000)}
        follow("o/m", HOSTS, sizes, self.look, clock=lambda: self.now, pause=self.pause)


def test_it_ends_once_all_have_all_of_it() -> None:
    nodes = Nodes(
        (Progress(100, over=False), Progress(3000, over=False)),
        (Progress(2000, over=False), Progress(4000, over=True)),
        (Progress(4000, over=True), Progress(4000, over=True)),
    )
    nodes.follow()
    assert nodes.now == 2.0


def test_a_node_whose_download_breaks_off_is_named() -> None:
    broken = Progress(100, over=True, fault="model 'o/m': its download broke off")
    with pytest.raises(ConfigError, match=r"^node two: model 'o/m': its download broke off"):
        Nodes((Progress(1, over=False), broken)).follow()


def test_a_node_on_which_nothing_comes_is_given_up() -> None:
    nodes = Nodes((Progress(4000, over=True), Progress(3000, over=False)))
    with pytest.raises(RuntimeError, match=r"nothing came of o/m for 600 s on two\."):
        nodes.follow()
    assert nodes.now == STALLED_S + 1  # the first look had more than there was before


class Slow:
    total = 10

    def __init__(self) -> None:
        self.open, self.fails = False, ""

    def present(self) -> int:
        return 10 * self.open

    def fetch(self) -> None:
        while not self.open:
            time.sleep(0.01)
        if self.fails:
            raise ConfigError(self.fails)


def test_a_node_fetches_beside_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(downloads, "download_of", lambda path: slow if path == "o/m" else None)
    fetcher = Fetcher()
    assert fetcher.begin("o/other") == (0, 0) and fetcher.progress().over
    assert fetcher.begin("o/m") == (10, 0)
    assert fetcher.progress() == Progress(0, over=False)
    slow.fails, slow.open = "no room", True
    wait_for(lambda: fetcher.progress().over, "the download")
    assert fetcher.progress() == Progress(10, over=True, fault="no room")


def test_a_folder_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "others", lambda _: pytest.fail("asked"))
    for path in (str(tmp_path), "./here"):
        downloads.download_on_nodes(path, timeout_s=1)
