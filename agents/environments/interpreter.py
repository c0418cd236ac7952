"""A Python interpreter that keeps its state from call to call: a Jupyter kernel.

Runs in the environment's process, whose interpreter needs the packages jupyter_client and
ipykernel. The kernel is reached by sockets of the file system, never by the network.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from typing import Any

CELL_S = 120.0
"""Longest run of one cell. DeepSeek-V3.2 (2025), Appendix B, Table 7."""
START_S = 60.0
ENDING_S = 10.0
"""Longest wait for an interrupted cell to end; after that the kernel is started anew."""
MOST_CHARACTERS = 20_000
"""Of what one cell prints: the first and the last half."""
MOST_TRIES = 3
"""Of a cell that the kernel leaves out after an interrupt."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CURE = "python -m pip install jupyter_client ipykernel"


class Interpreter:
    """An environment of one tool; the verdict is somebody else's.

    cell_s: seconds for one cell; ending_s: longest wait for one that was interrupted to end. A
    call's own deadline must be later than both and START_S together.
    """

    def __init__(self, cell_s: float = CELL_S, ending_s: float = ENDING_S) -> None:
        if not 0 < cell_s < 86_400:
            raise ValueError(f"interpreter: cell_s = {cell_s} must be positive and less than a day")
        try:
            import ipykernel  # noqa: F401, PLC0415  # pyright: ignore
            from jupyter_client.manager import KernelManager  # noqa: PLC0415  # pyright: ignore
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {_CURE}") from error
        self._cell_s, self._ending_s = cell_s, ending_s
        self._kind: Any = KernelManager
        self._started = 0
        self._seed = 0
        self._folder = tempfile.mkdtemp(prefix="kernel-")
        os.environ["IPYTHONDIR"] = os.path.join(self._folder, "ipython")
        os.environ["JUPYTER_RUNTIME_DIR"] = self._folder
        self._manager: Any = None
        self._client: Any = None

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        self._seed = seed
        self._start()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression.
        Variables, functions and imports stay for later calls.

        Args:
            code: One cell.
        """
        for _ in range(MOST_TRIES):
            said = self._run(code)
            if said is not None:
                return said
        return self._anew("The kernel ran the cell in none of several tries")

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._manager is not None and self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)

    def _start(self) -> None:
        self._started += 1  # a manager that has shut down has closed its sockets for good
        self._manager = self._kind(
            transport="ipc",
            ip=os.path.join(self._folder, f"k{self._started}"),
            connection_file=os.path.join(self._folder, f"kernel{self._started}.json"),
        )
        # History is a database in somebody's home; colours are noise.
        options = ["--HistoryManager.enabled=False", "--InteractiveShell.colors=NoColor"]
        self._manager.start_kernel(extra_arguments=options)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)
        self._run(f"__import__('random').seed({self._seed})")

    def _anew(self, why: str) -> str:
        self._stop()
        self._start()
        return f"{why}; it was started anew, and all variables are gone."

    def _run(self, code: str) -> str | None:
        """What a cell says. None: the kernel left it out, as it may after an interrupt."""
        # Without it, a cell that fails has the kernel leave out what comes next.
        number = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        said = _Said()
        until, interrupted = time.monotonic() + self._cell_s, False
        while True:
            if not self._manager.is_alive():
                return str(said) + self._anew("The kernel died")
            if time.monotonic() >= until:
                if interrupted:
                    why = f"The cell ran for {self._cell_s:g} s, and could not be interrupted"
                    return str(said) + self._anew(why)
                interrupted, until = True, time.monotonic() + self._ending_s
                self._manager.interrupt_kernel()
            try:
                message = self._client.get_iopub_msg(
                    timeout=min(0.5, max(0.0, until - time.monotonic()))
                )
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            said.add(message["msg_type"], message["content"])
        if interrupted:
            said.write(f"\nInterrupted: a cell may run for {self._cell_s:g} s.")
        return None if self._left_out(number) else str(said)

    def _left_out(self, number: str) -> bool:
        until = time.monotonic() + self._ending_s
        while time.monotonic() < until:
            try:
                reply = self._client.get_shell_msg(timeout=0.5)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == number:
                return reply["content"]["status"] == "aborted"
        return False


class _Said:
    """What a cell says, its middle left out where it is too long."""

    def __init__(self) -> None:
        self._first, self._last, self._count = "", "", 0

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "stream":
            self.write(content["text"])
        elif kind in ("execute_result", "display_data"):
            self.write(content["data"].get("text/plain", "") + "\n")
        elif kind == "error":
            self.write(_ESCAPES.sub("", "\n".join(content["traceback"])) + "\n")

    def write(self, text: str) -> None:
        half = MOST_CHARACTERS // 2
        self._count += len(text)
        room = half - len(self._first)
        self._first += text[:room]
        self._last = (self._last + text[room:])[-half:]

    def __str__(self) -> str:
        gone = self._count - len(self._first) - len(self._last)
        middle = f"\n[{gone} characters left out]\n" if gone else ""
        return (self._first + middle + self._last).strip()
