"""Run folders as data, as a page and in `keel watch`."""

import base64
import gzip
import hashlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.report import page as page_module
from keel.commands.report.folders import read_folder
from keel.commands.report.page import _HOST, _SCRIPTS, _Server, page
from tests.commands.report.runs import (
    ATTACKS,
    BREAKS,
    KINDS,
    group_of,
    write_evaluation,
    write_run,
    write_step,
)


def test_run_as_data(tmp_path: Path) -> None:
    run, chunks = read_folder(write_run(tmp_path / "run"))
    assert (run.name, run.kind, run.notes) == ("run", "run", [])
    assert run.steps == [0, 1, 2, 3]
    assert run.metrics["eval/sums/pass@1"] == [0.25, None, None, None]
    assert run.metrics["time/rollout"] == [2.0] * 4
    assert [event["kind"] for event in run.events] == list(KINDS)
    assert run.knobs["algorithm.group_size"] == "8"
    assert run.knobs["data.sources[spiral].kl_coef"] == "0.002"
    assert run.summary["steps"] == "3 of 60"
    assert len(run.groups) == 3 * (len(ATTACKS) + 1) and len(chunks) == 3
    for group in run.groups:  # the index points to the right line
        line = json.loads(gzip.decompress(chunks[group.chunk].read()).splitlines()[group.line])
        assert (line["prompt"], line["domain"]) == (group.prompt, group.domain)
        assert [one["reward"] for one in line["trajectories"]] == group.rewards


def test_active_or_killed_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_step(folder, 1, [])
    write_step(folder, 2, [], **{"eval/sums/pass@1": 0.5})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.')
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "step_000002.tmp").write_bytes(b"\x1f\x8b half of a file")
    run, chunks = read_folder(folder)
    assert run.steps == [1, 2] and not chunks
    assert len(run.notes) == 2  # it has no config.yaml, and no trajectories


def test_damaged_files_are_omitted_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    deep, large = "[" * 100_000, f'{{"step": 1, "loss": {"9" * 400}}}'
    path.write_text("\n".join([first, "[1]", '{"step": 1, "los', deep, large, *rest, ""]))
    with (folder / "events.jsonl").open("a") as file:
        file.write(f'{deep}\n{{"step": {"9" * 400}, "kind": "alarm"}}\n')
    packed = folder / "trajectories" / "step_000002.tokens.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-40])
    for number, text in ((3, '{"a": 1}'), (4, deep), (5, f'{{"prompt": {"9" * 5000}}}')):
        file = packed.with_name(f"step_{number:06d}.tokens.jsonl.gz")
        file.write_bytes(gzip.compress(f"{text}\n".encode()))
    (folder / "config.yaml").write_text("run: {dir: [")
    run, chunks = read_folder(folder)
    assert run.steps == [0, 1, 2, 3] and list(chunks) == ["step_000001.tokens.jsonl.gz"]
    assert run.metrics["reward/mean"][1] == 0.01 and run.metrics["loss"] == [None] * 4
    lines = ("metrics.jsonl:2", "metrics.jsonl:3", "metrics.jsonl:4", "events.jsonl:4")
    named = ("config.yaml", *lines, *(f"step_{number:06d}" for number in (2, 3, 4, 5)))
    assert len(run.notes) == len(named)
    assert all(name in note for name, note in zip(named, run.notes, strict=True))


def test_evaluation_as_data(tmp_path: Path) -> None:
    run, chunks = read_folder(write_evaluation(tmp_path / "eval", prompts=45))
    assert (run.kind, len(run.groups), len(chunks)) == ("evaluation", 45, 3)
    assert run.summary["pass@1 sums"].startswith("0.333 (0.")
    group = run.groups[44]
    line = json.loads(gzip.decompress(chunks[group.chunk].read()).splitlines()[group.line])
    assert line["prompt"] == group.prompt == "sums/44"
    assert line["trajectories"][1]["messages"][0]["reasoning_content"] == "hm"
    assert line["dropped"] == ["cut off"]
    assert line["reference"] == "2" and line["trajectories"][0]["answer"] == "1"


def test_changed_knobs_match_the_recipe(tmp_path: Path) -> None:
    run, _ = read_folder(write_run(tmp_path / "run", "trainer.lr=3e-4", steps=1))
    assert {"trainer.lr", "run.dir", "data.sources[spiral].task"} <= {*run.changed}
    assert not {"sft.sources", "data.sources[spiral].path", "algorithm.group_size"} & {*run.changed}
    assert len(run.changed) < 40 < len(run.knobs)
    chosen = {"values": {"rollout.engines": 2}}
    (tmp_path / "run" / "chosen.json").write_text(json.dumps(chosen))
    again, _ = read_folder(tmp_path / "run")
    assert {*run.changed} - {*again.changed} == {"rollout.engines"}


def test_agents_evaluation_plots_score_by_steps(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    path = folder / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for turns, one in enumerate(line["samples"], start=2):
            one["turns"] = turns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, _ = read_folder(folder)
    assert run.steps == [2, 5, 8]
    assert run.metrics["eval/sums: recipe/score by steps"] == [pytest.approx(1 / 3), None, None]
    wider = run.metrics["eval/sums: parallel-fewest-step/score by steps"]
    assert wider[0] == pytest.approx(1 / 3) and wider[2] == 0.0


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
    assert len(ours) == len(_SCRIPTS) + 1 and others == {"application/json", "text/plain"}
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"img", "svg", "iframe", "link", "object", "base", "form"}
    assert all(not name.startswith("on") for _, about in parsed.tags for name in about)
    # Not even what would have to be parsed to be harmless, past our own scripts and the title.
    data = next(script for about, script in parsed.scripts if about.get("id") == "data")
    assert "<" not in data and BREAKS in data
    assert json.loads(data)["runs"][0]["groups"][0]["prompt"] in ATTACKS
    # All that can run has its digest in the policy, and the policy has nothing else.
    equal = [a for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    (allowed,) = (about["content"] or "" for about in equal)
    (listed,) = re.findall(r"script-src ([^;]*);", allowed)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in ours]
    assert listed.split() == [f"'sha256-{digest}'" for digest in digests]
    assert allowed.startswith("default-src 'none';") and "connect-src 'none'" in allowed


def test_our_scripts_never_parse_html() -> None:
    folder = Path(page_module.__file__).parent / "page"
    assert {path.name for path in folder.glob("*.js")} == set(_SCRIPTS)
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
    half = sum(chunk.size for chunk in chunks.values()) // 2
    monkeypatch.setattr(page_module, "_MOST_BYTES", half + 1)
    (state,) = Parsed(page([(run, chunks)])).state["runs"]
    assert {group["step"] for group in state["groups"]} == {1, 3}  # the last among them
    assert len(state["notes"]) == 1


def test_different_recipes_and_evaluation_on_one_page(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "b" / folder.name, "trainer.lr=1e-6", steps=1)
    evaluation = write_evaluation(tmp_path / "eval")
    out = tmp_path / "all.html"
    assert main(["report", *map(str, (folder, other, evaluation)), "--out", str(out)]) == 0
    runs = Parsed(out.read_text()).state["runs"]
    assert [run["name"] for run in runs] == [str(folder), str(other), "eval"]
    one, two = (run["knobs"] for run in runs[:2])
    assert {k for k in one if one[k] != two[k]} == {"run.dir", "trainer.lr"}
    assert [len(run["steps"]) for run in runs] == [4, 2, 0]


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def server(watched: Path) -> Iterator[_Server]:
    with _Server([str(watched)], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def get(server: _Server, path: str, **headers: str) -> tuple[int, bytes, str]:
    """Return status, body and ETag. `{token}` in the path is replaced."""
    connection = http.client.HTTPConnection(_HOST, server.server_port, timeout=60)
    try:
        connection.request("GET", path.replace("{token}", server.token), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers["ETag"] or ""
    finally:
        connection.close()


def test_only_who_has_the_address_sees_anything(server: _Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    for path in ("/", "/data", "/chunk", "/?token=", "/?token=x", "/data?token={token}x"):
        status, body, _ = get(server, path)
        assert (status, b"keel watch" in body, b"script" in body) == (403, True, False), path
    # A page elsewhere that had its own name point here.
    status, _, _ = get(server, "/data?token={token}", Host=f"evil.example:{server.server_port}")
    assert status == 403
    status, body, _ = get(server, "/?token={token}")
    assert status == 200 and b"connect-src 'self'" in body and b"text/plain" not in body


def test_it_follows_the_run(server: _Server, watched: Path) -> None:
    status, body, mark = get(server, "/data?token={token}")
    assert status == 200 and json.loads(body)["runs"][0]["steps"] == [0, 1, 2, 3]
    assert get(server, "/data?token={token}", **{"If-None-Match": mark})[:2] == (304, b"")
    write_step(watched, 4, [group_of("new", ["a", "b"], [1, 0])])
    status, body, after = get(server, "/data?token={token}", **{"If-None-Match": mark})
    assert status == 200 and after != mark
    run = json.loads(body)["runs"][0]
    assert run["steps"][-1] == 4 and run["groups"][-1]["prompt"] == "new"
    name = run["groups"][-1]["chunk"]
    status, body, _ = get(server, f"/chunk?token={{token}}&run=0&chunk={name}")
    assert status == 200 and json.loads(gzip.decompress(body))["prompt"] == "new"
    for path in (
        "/chunk?token={token}&run=0&chunk=../config.yaml",
        "/chunk?token={token}&run=7&chunk=step_000001.tokens.jsonl.gz",
        "/config.yaml?token={token}",
        "/../../etc/passwd?token={token}",
    ):
        assert get(server, path)[0] == 404, path
