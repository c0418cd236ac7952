"""The report in a real browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keel.commands.report.folders import read_folder
from keel.commands.report.page import page, report
from keel.commands.report.watch import Follower, Server
from tests.commands.report.browser import BROWSER, Browser
from tests.commands.report.runs import (
    ATTACKS,
    BREAKS,
    group_of,
    write_evaluation,
    write_run,
    write_step,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not BROWSER, reason="no Chromium to look at reports with"),
]
SAMPLED = '<think>Let me add.</think>I call.<tool_call>{"name": "add"}</tool_call>It is 3.'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / f"a<b>&%{{x}} {BREAKS}")


@pytest.fixture
def opened(browser: Browser, folder: Path) -> Iterator[Browser]:
    report([str(folder)], str(folder.parent / "report.html"))
    browser.errors.clear()
    browser.open((folder.parent / "report.html").as_uri())
    yield browser
    unbroken(browser)


def unbroken(browser: Browser) -> None:
    assert browser.errors == []
    assert browser.js("document.title").endswith("· Keel")
    bad = "script, img, iframe, object, embed, svg a, [onerror], [onload], [onclick]"
    assert browser.texts(f"#view :is({bad})") == []
    links = browser.js("[...document.links].map((one) => one.protocol)")
    assert set(links) <= {"file:", "http:"}


def place(folder: Path, prompt: str) -> int:
    groups = read_folder(folder)[0].groups
    return next(at for at, group in enumerate(groups) if group.prompt.startswith(prompt))


def test_curves_are_drawn_where_one_looks(opened: Browser) -> None:
    opened.show(view="curves")
    opened.wait("document.querySelectorAll('.plot .main-svg').length > 0")
    assert "reward" in opened.texts(".summary .dim")
    plots = "[...document.querySelectorAll('.plot')].map((one) => one.dataset.plot)"
    assert opened.js(plots) == ["reward/mean", "seconds of a step"]
    constant = {"eval/sums/pass@1 0.25", "domain/a/reward_mean 0.5", "time/sync 0.5"}
    assert constant <= set(opened.texts(".flat > span"))
    assert ATTACKS[2] in opened.texts("td")  # an event's words
    seconds = "document.querySelector('[data-plot=\"seconds of a step\"]')"
    opened.wait(f"!!{seconds}.querySelector('.main-svg')")
    assert opened.js(f"{seconds}.layout.shapes.map((one) => one.x0)") == [2, 2, 2]
    assert opened.js(f"[...{seconds}.data[2].x]") == [1, 2, 3]  # step 0 has no time/sync
    opened.show(view="curves", axis="hours")
    opened.wait("!!document.querySelector('.plot .main-svg')")


def test_other_curves_are_drawn_when_one_looks(browser: Browser, tmp_path: Path) -> None:
    for step in range(3):
        write_step(tmp_path / "run", step, [], **{f"other/{at}": step * 1e-6 for at in range(40)})
    report([str(tmp_path / "run")], str(tmp_path / "r.html"))
    browser.errors.clear()
    browser.open((tmp_path / "r.html").as_uri())
    drawn(browser)
    last = "document.querySelector('[data-plot=\"other/9\"]')"
    assert browser.js(last) is None and "Show 40 more curves" in browser.texts("#view a")
    browser.show(view="curves", all=1)
    assert not browser.js(f"!!{last}.querySelector('.main-svg')")
    browser.js(f"{last}.scrollIntoView(); 0")
    browser.wait(f"!!{last}.querySelector('.main-svg')")
    low, high = browser.js(f"{last}.layout.yaxis.range")
    assert -1e-6 < low < high < 3e-6
    unbroken(browser)


def test_spike_is_drawn_at_its_step(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    for step in range(6001):
        seconds = {"time/rollout": 2.0 + step % 7, "time/train": 1.0 + step % 5}
        write_step(folder, step, [], **seconds, grad_norm=99.0 if step == 4321 else step % 3)
    report([str(folder)], str(tmp_path / "r.html"))
    browser.errors.clear()
    browser.open((tmp_path / "r.html").as_uri())
    browser.wait("!!document.querySelector('.plot .main-svg')")
    plot = "document.querySelector('[data-plot=\"grad_norm\"]')"
    browser.js(f"{plot}.scrollIntoView(); 0")
    browser.wait(f"!!{plot}.querySelector('.main-svg')")
    x, y = (browser.js(f"[...{plot}.data[0].{axis}]") for axis in "xy")
    assert len(x) < 1100 and (x[0], x[-1]) == (0, 6000) and 4321 in x
    assert y == [99 if step == 4321 else step % 3 for step in x]
    rollout, train = browser.js(
        "keel.curves.split(keel.runs[0], 'step').map(({ x, y }) => ({ x, y }))"
    )
    assert rollout["x"] == train["x"] and rollout["y"] == [2 + x % 7 for x in rollout["x"]]
    assert train["y"] == [1 + x % 5 for x in train["x"]]
    unbroken(browser)


def drawn(browser: Browser) -> None:
    browser.wait("document.querySelector('#view').dataset.drawn !== undefined")


def test_evaluation_opens_with_its_results(browser: Browser, tmp_path: Path) -> None:
    report([str(write_evaluation(tmp_path / "eval"))], str(tmp_path / "r.html"))
    browser.errors.clear()
    browser.open((tmp_path / "r.html").as_uri())
    drawn(browser)
    assert "pass@1 sums" in browser.texts(".summary .dim")
    assert browser.texts(".plot") == []
    unbroken(browser)


def test_events_show_kind_and_run(browser: Browser, tmp_path: Path) -> None:
    kinds = ("resume", "engine", "alarm", "frozen", "restart", "fewer", "out of memory", "end")
    for name, number, apart_s, some in (
        ("a", 3, 100, kinds),
        ("b", 250, 1, ("alarm", "constructor")),
    ):
        folder = write_run(tmp_path / name, steps=2)
        events = [
            {"step": 1, "time": 1e9 + at * apart_s, "kind": kind, "text": f"{name}{at}"}
            for at in range(number)
            for kind in some
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    out = tmp_path / "r.html"
    report([str(tmp_path / "a"), str(tmp_path / "b")], str(out))
    browser.errors.clear()
    browser.open(out.as_uri())
    drawn(browser)
    assert browser.texts("nav a[aria-current]") == ["Overview"]
    legend = browser.texts(".event")
    assert len(legend) == len(kinds) + 1 and legend[0] == "resumed"
    colours = browser.js("[...document.querySelectorAll('.event')].map((one) => one.style.color)")
    assert len(set(colours)) == len(colours)
    plot = "document.querySelector('[data-plot=\"reward/mean\"]')"
    browser.wait(f"!!{plot}.querySelector('.main-svg')")
    shapes = browser.js(f"{plot}.layout.shapes.map((one) => one.label.text + one.line.color)")
    assert len(shapes) == len(set(shapes)) == len(kinds) + 2
    rows = browser.texts("#events tr")
    whose = "".join(row[0] for row in rows)  # the last of each, by their time
    assert whose == "a" * 16 + "b" * 100 + "a" * 8 + "b" * 100
    unbroken(browser)


def test_long_alarm_is_two_shapes(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    events = [{"step": s, "time": 1e9, "kind": "alarm", "text": ""} for s in range(1, 3001)]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    report([str(folder)], str(tmp_path / "r.html"))
    browser.errors.clear()
    browser.open((tmp_path / "r.html").as_uri())
    plot = "document.querySelector('[data-plot=\"reward/mean\"]')"
    browser.wait(f"!!{plot}?.querySelector('.main-svg')")
    lines, last = browser.js(f"{plot}.layout.shapes")
    assert lines["path"].count("M") == 2999 and lines["path"].startswith("M1,0V1M2,0V1")
    assert last["x0"] == 3000
    assert len(browser.js(f"[...{plot}.querySelectorAll('.shapelayer path')].map(() => 0)")) == 2
    unbroken(browser)


def test_tokens_with_their_numbers(opened: Browser, folder: Path) -> None:
    sums = place(folder, "sums")
    opened.show(view="read", group=sums)
    assert [text.split(" ·")[0] for text in opened.texts(".member h3")] == ["reward 1", "reward 0"]
    first = ".member:first-child"
    folds = ["prompt, 25 characters", "thinking, 26 tokens", "calls: add"]
    assert opened.texts(f"{first} summary") == [*folds, "results and context, 36 characters"]
    assert "correct 1" in opened.texts(f"{first} .parts")[0]
    assert opened.texts(f"{first} .note") == ["blue: 0.25: because x"]
    assert opened.texts(f"{first} .tags")[0].startswith("sample 1 · ")
    # Folded: the tokens of thinking and calls are not even made.
    assert "".join(opened.texts(f"{first} .said span")) == "I call.It is 3."
    opened.show(view="read", group=sums, open=1)
    assert "".join(opened.texts(f"{first} .said span")) == SAMPLED
    tokens = f"[...document.querySelectorAll('{first} .said span')]"
    for colour, neutral in (
        *(("logp", False), ("advantage", False), ("ratio", False), ("overlap", False)),
        *(("kept", True), ("version", True)),  # a mask of one id, one version
    ):
        opened.show(view="read", group=sums, open=1, colour=colour)
        painted = opened.js(f"{tokens}.map((one) => one.style.backgroundColor)")
        assert len(painted) == len(SAMPLED) and len(set(painted)) == 1
        assert (painted[0] == "") == neutral, colour
    opened.js(f"{tokens}[8].dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}})); 0")
    (tip,) = opened.texts("#tip:not([hidden])")
    assert tip.splitlines()[0] == json.dumps(SAMPLED[8])
    for line in ("log-probability  -0.5", "ratio π_θ/π_old  1.105", "routing overlap  0.5"):
        assert line in tip
    assert "version of the weights  7" in tip and "advantage  0.5" in tip


def test_selection_is_shown(opened: Browser) -> None:
    opened.show(view="read", domain="another", step=2)
    assert opened.js("[...document.querySelectorAll('select')].map((one) => one.value)")[:2] == [
        "2",
        "another",
    ]
    assert opened.js("document.querySelector('select').options[0].text") == "all"
    assert opened.texts(".list a") == []


def test_trajectory_cannot_inject_markup(opened: Browser, folder: Path) -> None:
    for attack in ATTACKS:
        shown_text = attack.encode(errors="replace").decode()
        opened.show(view="read", group=place(folder, attack[:-1]), open=1)
        assert "".join(opened.texts(".member:last-child .said span")) == shown_text
        assert any(attack[:20] in text for text in opened.texts("h2"))
        assert any(attack[:20] in text for text in opened.texts(".list a"))
        unbroken(opened)
    # Had one got through, the page's policy would have stopped it.
    opened.js(
        "const made = document.createElement('script');"
        f'made.textContent = "{BREAKS}"; document.body.append(made); made.remove(); 0'
    )
    assert any("Content Security Policy" in error for error in opened.errors)
    opened.errors.clear()


def test_runs_side_by_side(browser: Browser, folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", "trainer.lr=1e-6", steps=1)
    evaluation = write_evaluation(tmp_path / "eval")
    out = tmp_path / "all.html"
    out.write_text(
        page([read_folder(path) for path in (folder, other)] + [read_folder(evaluation)])
    )
    browser.errors.clear()
    browser.open(out.as_uri())
    browser.show(view="runs")
    differ = browser.texts("#differ + table tbody th")
    assert {"trainer.lr", "policy"} <= set(differ)
    assert "algorithm.group_size" not in differ  # the evaluation has no such knob; it is a default
    browser.show(view="read", run=2, group=1, open=1)
    assert "missing: cut off" in browser.texts(".note")
    assert browser.texts(".member details .said")[0] == "hm"
    assert browser.texts(".answer") == ["expected answer 2", *["answer 1"] * 2]
    unbroken(browser)


def test_only_visible_trajectories_are_rendered(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    one = group_of("one of many", ["some tokens " * 4] * 10, range(10))
    for step in range(1, 11):
        write_step(folder, step, [replace(one) for _ in range(100)])
    report([str(folder)], str(tmp_path / "r.html"))
    browser.open((tmp_path / "r.html").as_uri())
    browser.show(view="read", group=500)
    assert browser.texts(".list > div")[0] == "1000 groups, 10000 trajectories"
    assert len(browser.texts(".list a")) == 100 and len(browser.texts(".member")) == 10
    assert len(browser.texts("main *")) < 2_000 + 10 * len("some tokens " * 4)
    browser.js("document.querySelector('.list button').click()")
    assert len(browser.texts(".list a")) == 200
    browser.show(view="read", group=500, step=6)
    assert browser.texts(".list > div")[0] == "100 groups, 1000 trajectories"


def test_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    browser.errors.clear()
    with Server(Follower([str(folder)]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            browser.open(server.url)
            browser.show(view="read", group=place(folder, "sums"))
            assert len(browser.texts(".member")) == 2
            before = len(browser.texts(".list a"))
            write_step(folder, 4, [group_of("the newest", ["a", "b"], [1, 0])])
            browser.wait(f"document.querySelectorAll('.list a').length === {before + 1}")
            assert "the newest" in browser.texts(".list a")[0]
            run = "keel.runs[0]"
            assert browser.js(f"{run}.steps") == [0, 1, 2, 3, 4]
            assert browser.js(f"{run}.metrics['time/rollout'].at") == [0, 1, 2, 3, 4]
            # Updates do not collapse open sections; they are drawn once closed.
            browser.js("document.querySelector('#notes').open = true; 0")
            browser.js("document.querySelector('.member details').open = true; 0")
            write_step(folder, 5, [group_of("the very newest", ["a", "b"], [1, 0])])
            browser.wait("keel.main.behind")
            assert "unfolded" in browser.texts("#status")[0]
            assert len(browser.texts(".list a")) == before + 1
            browser.js("document.querySelector('.member details').open = false; 0")
            browser.wait(f"document.querySelectorAll('.list a').length === {before + 2}")
            assert "unfolded" not in browser.texts("#status")[0]
            unbroken(browser)
        finally:
            browser.call("Page.navigate", url="about:blank")
            server.shutdown()
            thread.join(60)
