"""A headless Chromium, controlled over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
DEADLINE_S = 300.0


class Browser:
    """A context manager with one page."""

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
        """Exceptions and policy violations on pages."""
        self.call("Runtime.enable")
        self.call("Log.enable")

    def __enter__(self) -> Browser:
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

    def picture(self, path: Path) -> None:
        reply = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(reply["data"]))
