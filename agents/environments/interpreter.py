"""A Python interpreter that keeps its state from call to call: a Jupyter kernel, and files to look
into.

A task may bring files, in a line of JSONL: `"environment": {"files": ["sales.csv"]}`, of the folder
`files`, or with their text, `{"files": {"sales.csv": "day,units\\n…"}}`. Each episode has copies.

Runs in the environment's process, whose interpreter needs the packages jupyter_client and
ipykernel. The kernel is reached by sockets of the file system, never by the network.
"""

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
from typing import Any, cast

from keel.agents.env_runtime.socket_folder import socket_folder
from keel.agents.environments.messages import with_instructions

CELL_S = 120.0
"""Longest run of one cell. DeepSeek-V3.2 (2025), Appendix B, Table 7."""
START_S = 60.0
"""Longest wait for a kernel to start."""
ENDING_S = 10.0
"""Longest wait for an interrupted cell to end; after that the kernel is started anew."""
MOST_CHARACTERS = 20_000
"""Of what one cell prints: the first and the last half."""
SLACK = 0.05
"""Share of a call's time for all that is not waited for here."""
MOST_TRIES = 3
"""Of a cell that the kernel leaves out after an interrupt."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CURE = "python -m pip install jupyter_client ipykernel"


class Interpreter:
    """An environment of one tool; the verdict is somebody else's.

    cell_s: seconds for one cell; ending_s: longest wait for one that was interrupted to end. Where
    a call (`agents.call_s`) has no time for both and a new kernel, a cell has less (`shares`):
    else an endless one would cost the episode. files: the folder that tasks name files of; the
    policy can read all of it.
    """

    call_s = math.inf
    """Seconds of a call, set before each."""

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
        self._started = 0
        self._seed = 0
        self._files = files
        self._folder = socket_folder("kernel-", "k1000-5")
        self._where = os.path.join(self._folder, "work")
        os.mkdir(self._where)
        os.environ["IPYTHONDIR"] = os.path.join(self._folder, "ipython")
        os.environ["JUPYTER_RUNTIME_DIR"] = self._folder
        self._manager: Any = None
        self._client: Any = None

    def opening(self, task: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        # What a kernel knows the policy knows: never the seed that the task may be made from.
        own = hashlib.blake2b(f"kernel/{seed}".encode(), digest_size=4).digest()
        self._seed = int.from_bytes(own, "little")
        own_words: Mapping[str, Any] = task["reward"].get("environment") or {}
        names = put_files(own_words.get("files") or (), self._files, self._where)
        self._start()
        said = f"The working directory of the tool has {', '.join(names)}." if names else ""
        return with_instructions(task["messages"], said)

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression.
        Variables, functions and imports stay for later calls.

        Args:
            code: One cell.
        """
        within = split_call_time(self._cell_s, self._ending_s, self.call_s)
        for _ in range(MOST_TRIES):
            said = self._run(code, *within)
            if said is not None:
                return said
        return self._anew("The kernel ran the cell in none of several tries", within[-1])

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._manager is not None and self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)

    def _start(self, start_s: float = START_S) -> None:
        self._started += 1  # a manager that has shut down has closed its sockets for good
        self._manager = self._kind(
            transport="ipc",
            ip=os.path.join(self._folder, f"k{self._started}"),
            connection_file=os.path.join(self._folder, f"kernel{self._started}.json"),
        )
        # History is a database in somebody's home; colours are noise.
        options = ["--HistoryManager.enabled=False", "--InteractiveShell.colors=NoColor"]
        self._manager.start_kernel(extra_arguments=options, cwd=self._where)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=start_s)
        self._client.execute(f"__import__('random').seed({self._seed})", silent=True)

    def _anew(self, why: str, start_s: float) -> str:
        self._stop()
        self._start(start_s)
        return f"{why}; it was started anew, and all variables are gone."

    def _run(self, code: str, cell_s: float, ending_s: float, start_s: float) -> str | None:
        """What a cell says. None: the kernel left it out, as it may after an interrupt."""
        # Without it, a cell that fails has the kernel leave out what comes next.
        number = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        said = _Said()
        until, interrupted = time.monotonic() + cell_s, False
        while True:
            if not self._manager.is_alive():
                return str(said) + self._anew("The kernel died", start_s)
            if time.monotonic() >= until:
                if interrupted:
                    why = f"The cell ran for {cell_s:g} s, and could not be interrupted"
                    return str(said) + self._anew(why, start_s)
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
            said.add(message["msg_type"], message["content"])
        if interrupted:
            said.write(f"\nInterrupted: a cell may run for {cell_s:g} s.")
        return None if self._left_out(number, ending_s) else str(said)

    def _left_out(self, number: str, ending_s: float) -> bool:
        until = time.monotonic() + ending_s
        while time.monotonic() < until:
            try:
                reply = self._client.get_shell_msg(timeout=0.5)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == number:
                return reply["content"]["status"] == "aborted"
        return False


def split_call_time(cell_s: float, ending_s: float, call_s: float) -> tuple[float, float, float]:
    """Of a call's seconds: what a cell may take, the wait for it to end once interrupted, and the
    start of a kernel in place of one that does not."""
    within_s = (1 - SLACK) * call_s
    ending_s, start_s = min(ending_s, within_s / 4), min(START_S, within_s / 4)
    left_s = within_s - ending_s - start_s
    if 1 < left_s < cell_s:
        left_s = math.floor(left_s)  # the policy is told of it
    return min(cell_s, left_s), ending_s, start_s


def put_files(given: Any, folder: str, where: str) -> list[str]:
    """Files of a task into an episode's folder; returns each with its size, for people. given:
    their names in `folder`, or their text by name. Raises ValueError for what is no file."""
    if not isinstance(given, (list, tuple, dict)):
        raise ValueError(f"`files` must list names, or give texts by name, is {given!r}"[:200])
    said: list[str] = []
    files = cast("Mapping[Any, Any] | Sequence[Any]", given)
    for name in files:
        parts = str(name).split("/")
        if not isinstance(name, str) or not all(parts) or {".", ".."} & set(parts):
            raise ValueError(f"`files` has {name!r}; name a file in the folder, as in a/b.csv")
        to = os.path.join(where, *parts)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if isinstance(files, Mapping):
            if not isinstance(files[name], str):
                kind = type(files[name]).__name__
                raise ValueError(f"`files` has a {kind} for {name!r}, must give its text")
            with open(to, "w", encoding="utf-8", newline="") as file:
                file.write(files[name])
        else:
            root = os.path.realpath(folder)
            source = os.path.realpath(os.path.join(root, *parts))
            if not folder or os.path.commonpath((root, source)) != root:
                raise ValueError(f"`files` has {name!r}: not in the folder {folder!r} (files)")
            if not os.path.isfile(source):
                raise ValueError(f"`files` has {name!r}: there is no such file in {folder}")
            shutil.copyfile(source, to)
        said.append(f"{name} ({os.path.getsize(to):,} bytes)")
    return said


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Before a run, outside the sandbox: the arguments, and what an episode reads of this machine.
    without: files with answers, which it does not see anyway. Raises ValueError."""
    if not (folder := str(arguments.get("files") or "")):
        return dict(arguments), []
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"interpreter: files = {folder}: there is no such folder")
    return {**arguments, "files": str(path)}, [path]


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
