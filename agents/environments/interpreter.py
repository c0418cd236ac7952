r"""A Python interpreter environment that keeps its state between calls. The interpreter is a
Jupyter kernel that gets a copy of the task's files. A task can name files in the folder `files`
(`"environment": {"files": ["sales.csv"]}`) or contain them (`{"files": {"sales.csv":
"day,units\n…"}}`). Requires the packages jupyter_client and ipykernel."""

from __future__ import annotations

import hashlib
import math
import os
import queue
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.agents.env_runtime.processes import make_socket_folder
from keel.agents.environments import add_instructions

CELL_S = 120.0
"""Time limit for a cell in seconds (DeepSeek-V3.2, 2025, Appendix B, Table 7)."""
_START_S = 60.0
ENDING_S = 10.0
"""Seconds that an interrupted cell has to stop before the kernel is restarted."""
_MAX_OUTPUT = 20_000
_SLACK = 0.05
"""Fraction of a call's time that `split_call_time` does not assign to any of its three limits."""
_MAX_TRIES = 3
"""Number of times to run a cell that the kernel aborts after an interrupt."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CURE = "python -m pip install jupyter_client ipykernel"


class Interpreter:
    """An environment without grading whose only tool is a Python interpreter. A cell can run for
    `cell_s` seconds, or less if the time limit of a call (`agents.call_s`) is shorter. After an
    interrupt, it has `ending_s` seconds to stop. The policy can read all files in the folder
    `files`."""

    call_s = math.inf

    def __init__(self, cell_s: float = CELL_S, ending_s: float = ENDING_S, files: str = "") -> None:
        if not 0 < cell_s < 86_400:
            raise ValueError(f"interpreter: cell_s = {cell_s} must be positive and less than a day")
        try:
            import ipykernel  # noqa: F401, PLC0415  # pyright: ignore
            from jupyter_client.manager import KernelManager  # noqa: PLC0415  # pyright: ignore
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {_CURE}") from error
        self._cell_s, self._ending_s = cell_s, ending_s
        self._kind: Any = KernelManager
        self._started, self._seed, self._files = 0, 0, files
        self._folder = make_socket_folder("kernel-", "k1000-5")
        self._where = os.path.join(self._folder, "work")
        os.mkdir(self._where)
        os.environ["IPYTHONDIR"] = os.path.join(self._folder, "ipython")
        os.environ["JUPYTER_RUNTIME_DIR"] = self._folder
        self._manager: Any = None
        self._client: Any = None

    def opening(self, task: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        # The policy can read the kernel's seed, so it must differ from the task's.
        digest = hashlib.blake2b(f"kernel/{seed}".encode(), digest_size=4).digest()
        self._seed = int.from_bytes(digest, "little")
        own_words: Mapping[str, Any] = task["reward"].get("environment") or {}
        names = _put_files(own_words.get("files") or (), self._files, self._where)
        self._start()
        text = f"The working directory of the tool has {', '.join(names)}." if names else ""
        return add_instructions(task["messages"], text)

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression.
        Variables, functions and imports stay for later calls.

        Args:
            code: One cell.
        """
        within = split_call_time(self._cell_s, self._ending_s, self.call_s)
        for _ in range(_MAX_TRIES):
            output = self._run(code, *within)
            if output is not None:
                return output
        return self._restart("The kernel ran the cell in none of several tries", within[-1])

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._manager is not None and self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)

    def _start(self, start_s: float = _START_S) -> None:
        self._started += 1  # a manager cannot be restarted after it has closed its sockets
        self._manager = self._kind(
            transport="ipc",
            ip=os.path.join(self._folder, f"k{self._started}"),
            connection_file=os.path.join(self._folder, f"kernel{self._started}.json"),
        )
        # The history is a database in the home folder.
        options = ["--HistoryManager.enabled=False", "--InteractiveShell.colors=NoColor"]
        self._manager.start_kernel(extra_arguments=options, cwd=self._where)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=start_s)
        self._client.execute(f"__import__('random').seed({self._seed})", silent=True)

    def _restart(self, why: str, start_s: float) -> str:
        self._stop()
        self._start(start_s)
        return f"{why}; it was started anew, and all variables are gone."

    def _run(self, code: str, cell_s: float, ending_s: float, start_s: float) -> str | None:
        """Run a cell and return its output, or None if the kernel aborted it after an interrupt."""
        # With stop_on_error, a failing cell makes the kernel abort the following ones.
        number = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        output = _Output()
        until, interrupted = time.monotonic() + cell_s, False
        while True:
            if not self._manager.is_alive():
                return str(output) + self._restart("The kernel died", start_s)
            if time.monotonic() >= until:
                if interrupted:
                    why = f"The cell ran for {cell_s:g} s, and could not be interrupted"
                    return str(output) + self._restart(why, start_s)
                interrupted, until = True, time.monotonic() + ending_s
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
            output.add(message["msg_type"], message["content"])
        if interrupted:
            output.write(f"\nInterrupted: a cell may run for {cell_s:g} s.")
        until = time.monotonic() + ending_s
        while time.monotonic() < until:
            try:
                reply = self._client.get_shell_msg(timeout=0.5)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == number:
                return None if reply["content"]["status"] == "aborted" else str(output)
        return str(output)


def split_call_time(cell_s: float, ending_s: float, call_s: float) -> tuple[float, float, float]:
    """Split the time limit of a call into limits for the cell, for interrupting it, and for
    restarting the kernel."""
    available_s = (1 - _SLACK) * call_s
    ending_s, start_s = min(ending_s, available_s / 4), min(_START_S, available_s / 4)
    remaining_s = available_s - ending_s - start_s
    if 1 < remaining_s < cell_s:
        remaining_s = math.floor(remaining_s)  # the policy reads this number
    return min(cell_s, remaining_s), ending_s, start_s


def _put_files(files: Mapping[str, str] | Sequence[str], folder: str, where: str) -> list[str]:
    """Write texts given by name to the folder `where`, or copy named files from `folder`. Returns
    a description of each."""
    descriptions: list[str] = []
    for name in files:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts):
            raise ValueError(f"`files` has {name!r}; name a file in the folder, as in a/b.csv")
        to = os.path.join(where, *parts)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if isinstance(files, Mapping):
            with open(to, "w", encoding="utf-8", newline="") as file:
                file.write(files[name])
        else:
            root = os.path.realpath(folder)
            source = os.path.realpath(os.path.join(root, *parts))
            inside = folder and os.path.commonpath((root, source)) == root
            if not inside or not os.path.isfile(source):
                raise ValueError(f"`files` has {name!r}: there is no such file in {folder!r}")
            shutil.copyfile(source, to)
        descriptions.append(f"{name} ({os.path.getsize(to):,} bytes)")
    return descriptions


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Validate the arguments before a run, outside the sandbox. Returns them with the paths that
    the environment has to read."""
    if not (folder := str(arguments.get("files") or "")):
        return dict(arguments), []
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"interpreter: files = {folder}: there is no such folder")
    return {**arguments, "files": str(path)}, [path]


class _Output:
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
        half = _MAX_OUTPUT // 2
        self._count += len(text)
        room = half - len(self._first)
        self._first += text[:room]
        self._last = (self._last + text[room:])[-half:]

    def __str__(self) -> str:
        gone = self._count - len(self._first) - len(self._last)
        middle = f"\n[{gone} characters left out]\n" if gone else ""
        return (self._first + middle + self._last).strip()
