"""The report in a headless Chromium, controlled over the DevTools protocol."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

from keel.commands.report.folders import read_folder
from keel.commands.report.page import report
from tests.commands.report.runs import BREAKS, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
DEADLINE_S = 300.0


class Browser:
    def __init__(self, home: Path) -> None:
        self._stack = ExitStack()
        self._process = subprocess.Popen(
            [
                *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-dev-shm-usage", "--disable-background-networking"),
                *("--window-size=1400,900", "--hide-scrollbars", f"--user-data-dir={home}"),
                *("--remote-debugging-port=0", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            file, end = home / "DevToolsActivePort", time.monotonic() + DEADLINE_S
            while not (file.exists() and file.read_text().count("\n")):
                assert self._process.poll() is None, "the browser has ended"
                assert time.monotonic() < end, "the browser does not start"
                time.sleep(0.05)
            port = file.read_text().splitlines()[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=DEADLINE_S) as answer:
                (target,) = [t for t in json.load(answer) if t["type"] == "page"]
            url = target["webSocketDebuggerUrl"]
            self._socket = self._stack.enter_context(connect(url, max_size=None, proxy=None))
        except BaseException:
            self._process.kill()
            raise
        self._calls = 0
        self.errors: list[str] = []
        self.call("Runtime.enable")
        self.call("Log.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._process.kill()
        self._process.wait(60)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            elif answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                self.errors += [str(entry["text"])] * (entry["level"] == "error")
            elif answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    def js(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Poll until the expression is true."""
        end = time.monotonic() + DEADLINE_S
        while not self.js(expression):
            assert time.monotonic() < end, f"waited for {expression}: {self.errors}"
            time.sleep(0.05)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && !!document.querySelector('#view')")

    def show(self, **settings: object) -> None:
        fragment = "#" + "&".join(f"{name}={quote(str(value))}" for name, value in settings.items())
        self.js(f"location.hash = {json.dumps(fragment)}; 0")
        self.wait(f"document.querySelector('#view').dataset.drawn === {json.dumps(fragment)}")

    def texts(self, selector: str) -> list[str]:
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.js(f"{every}.map((one) => one.textContent)")


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium: apt-get install chromium"),
]
SAMPLED = '<think>Let me add.</think>I call.<tool_call>{"name": "add"}</tool_call>It is 3.'


def place(folder: Path, prompt: str) -> int:
    groups = read_folder(folder)[0].groups
    return next(at for at, group in enumerate(groups) if group.prompt.startswith(prompt))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / f"a<b>&%{{x}} {BREAKS}")


@pytest.fixture
def opened(tmp_path: Path, folder: Path) -> Iterator[Browser]:
    report([str(folder)], str(tmp_path / "report.html"))
    with Browser(tmp_path / "browser") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        yield browser
        assert browser.errors == []


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
