"""The page contains everything a run wrote and executes none of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.report import page as page_module
from keel.commands.report.folders import read_folder
from keel.commands.report.page import SCRIPTS, page
from tests.commands.report.runs import ATTACKS, BREAKS, write_evaluation, write_run


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._inside:
            about, text = self.scripts[-1]
            self.scripts[-1] = (about, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    @property
    def state(self) -> dict[str, Any]:
        return next(json.loads(text) for about, text in self.scripts if about.get("id") == "data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / f"a<b {BREAKS}")


def test_run_text_is_never_markup(folder: Path) -> None:
    text = page([read_folder(folder)])
    parsed = Parsed(text)
    ours = [script for about, script in parsed.scripts if not about]
    others = {about["type"] for about, _ in parsed.scripts if about}
    assert len(ours) == len(SCRIPTS) + 1 and others == {"application/json", "text/plain"}
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"img", "svg", "iframe", "link", "object", "base", "form"}
    assert all(not name.startswith("on") for _, about in parsed.tags for name in about)
    # Not even what would have to be parsed to be harmless, past our own scripts and the title.
    data = next(script for about, script in parsed.scripts if about.get("id") == "data")
    assert "<" not in data and BREAKS in data
    assert json.loads(data)["runs"][0]["groups"][0]["prompt"] in ATTACKS
    # All that can run has its digest in the policy, and the policy has nothing else.
    (allowed,) = [
        about["content"] or ""
        for tag, about in parsed.tags
        if tag == "meta" and about.get("http-equiv") == "Content-Security-Policy"
    ]
    (listed,) = re.findall(r"script-src ([^;]*);", allowed)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in ours]
    assert listed.split() == [f"'sha256-{digest}'" for digest in digests]
    assert allowed.startswith("default-src 'none';") and "connect-src 'none'" in allowed


def test_our_scripts_never_parse_html() -> None:
    folder = Path(page_module.__file__).parent / "page"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
    for path in folder.glob("*.js"):
        assert not re.search(forbidden, path.read_text()), path


def test_every_trajectory_is_in_the_page(folder: Path) -> None:
    parsed = Parsed(page([read_folder(folder)]))
    chunks = {
        about["data-chunk"]: gzip.decompress(base64.b64decode(text)).decode().splitlines()
        for about, text in parsed.scripts
        if about.get("type") == "text/plain"
    }
    (run,) = parsed.state["runs"]
    for group in run["groups"]:
        line = json.loads(chunks[group["chunk"]][group["line"]])
        assert line["prompt"] == group["prompt"]
    *_, sums = [json.loads(line) for line in chunks["step_000001.tokens.jsonl.gz"]]
    assert sums["prompt"] == "sums"
    prompt, called, result, answered = sums["trajectories"][0]["contexts"][0]
    assert (prompt, result) == ("<|user|>Sum.<|assistant|>", "<|tool|>the result is 3<|assistant|>")
    assert "".join(answered["text"]) == "It is 3." and set(called["version"]) == {7}
    assert called["ratio"] == pytest.approx([1.10517] * len(called["text"]))


def test_large_page_is_limited_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, chunks = read_folder(folder)
    monkeypatch.setattr(
        page_module, "MOST_BYTES", sum(chunk.size for chunk in chunks.values()) // 2 + 1
    )
    (state,) = Parsed(page([(run, chunks)])).state["runs"]
    assert {group["step"] for group in state["groups"]} == {1, 3}  # the last among them
    assert "trajectories of 2 of 3 steps" in state["notes"][0]


def test_different_recipes_and_evaluation_on_one_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "b" / folder.name, "trainer.lr=1e-6", steps=1)
    evaluation = write_evaluation(tmp_path / "eval")
    out = tmp_path / "all.html"
    assert main(["report", *map(str, (folder, other, evaluation)), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    runs = Parsed(out.read_text()).state["runs"]
    assert [run["name"] for run in runs] == [str(folder), str(other), "eval"]
    one, two = (run["knobs"] for run in runs[:2])
    assert {k for k in one if one[k] != two[k]} == {"run.dir", "trainer.lr"}
    assert [len(run["steps"]) for run in runs] == [4, 2, 0]
