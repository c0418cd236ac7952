"""What the sandbox costs an environment: opening it, and many that are open at once.

    python -m benchmarks.rewards.environments [--live 200] [--rounds 15] [--kernels 3]

The calculator, and with `--kernels` the Python interpreter, in a process of its own: alone and in
the sandbox by turns, so that a machine which others use slows both alike. Memory is what the
processes have resident, shared pages split (Pss; only root sees it); `keeper` is the thread that
watches over the sandboxes' memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import keel
from keel.agents.host.client import Deadlines, Hosted, Program
from keel.agents.host.process import Wrap, not_wrapped
from keel.agents.host.room import make_room
from keel.rewards.sandbox.environments import environment_wrap
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt

TASK = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "Go."},))
SIX_BY_SEVEN = ToolCall(call_id="c", name="calculate", arguments={"expression": "6 * 7"})
AT_ONCE = 4
REST_S = 5.0


def hosted(wrap: Wrap, name: str, starting: asyncio.Semaphore | None = None) -> Hosted:
    program = Program(
        target=f"keel.agents.environments.{name}",
        folder=Path(keel.__file__).parent,
        deadlines=Deadlines(open_s=300),
        wrap=wrap,
    )
    return Hosted(program, starting=starting)


async def open_ms(wrap: Wrap, name: str) -> float:
    environment = hosted(wrap, name)
    began = time.perf_counter()
    await environment.open(TASK, seed=0)
    taken = time.perf_counter() - began
    await environment.close()
    return taken * 1e3


async def live(wrap: Wrap, count: int) -> str:
    starting = asyncio.Semaphore(AT_ONCE)
    environments = [hosted(wrap, "calculator:Calculator", starting) for _ in range(count)]
    cpu, began = cpu_s(), time.perf_counter()
    await asyncio.gather(*(one.open(TASK, seed=0) for one in environments))
    opened = time.perf_counter() - began
    pids = below(os.getpid())
    taken, resting = sum(map(pss_mib, pids)), cpu_s()[0]
    await asyncio.sleep(REST_S)
    keeper = (cpu_s()[0] - resting) / REST_S
    began = time.perf_counter()
    for result in await asyncio.gather(*(e.call(SIX_BY_SEVEN, timeout_s=60) for e in environments)):
        assert result.text == "42", result
    called = time.perf_counter() - began
    began = time.perf_counter()
    await asyncio.gather(*(one.close() for one in environments))
    closed = time.perf_counter() - began
    ours, theirs = (1e3 * (b - a) / count for a, b in zip(cpu, cpu_s(), strict=True))
    assert not below(os.getpid())
    return (
        f"opened in {opened:.1f} s, {len(pids) / count:.0f} processes and "
        f"{taken / count:.1f} MiB each, keeper {100 * keeper:.1f} % of a core, a call of all "
        f"{1e3 * called:.0f} ms, closed in {closed:.1f} s; CPU of each {theirs:.0f} ms, of this "
        f"process for it {ours:.1f} ms"
    )


def below(pid: int) -> list[int]:
    lists = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(child) for found in lists for child in found]
    return children + [one for child in children for one in below(child)]


def pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_s() -> tuple[float, float]:
    """Of this process, and of those that it has reaped."""
    both = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, theirs = (used.ru_utime + used.ru_stime for used in both)
    return own, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=200, help="open at once")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", type=int, default=0, help="rounds with a Jupyter kernel")
    options = parser.parse_args()
    make_room(options.live)
    load = os.getloadavg()[0]
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {load:.1f}, python {sys.version[:7]}"
    )
    sandbox = environment_wrap("bubblewrap")
    assert sandbox is not None
    ways: dict[str, Wrap] = {"alone": not_wrapped, "sandbox": sandbox}
    for name, rounds in (
        ("calculator:Calculator", options.rounds),
        ("interpreter:Interpreter", options.kernels),
    ):
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, wrap in ways.items():
                taken[way].append(asyncio.run(open_ms(wrap, name)))
        if rounds:
            said = ", ".join(f"{way} {statistics.median(ms):.0f} ms" for way, ms in taken.items())
            more = statistics.median(
                b - a for a, b in zip(taken["alone"], taken["sandbox"], strict=True)
            )
            print(f"{name}: opens in {said}; median difference {more:.0f} ms", flush=True)
    for way, wrap in ways.items():
        print(f"{options.live} live, {way}: {asyncio.run(live(wrap, options.live))}", flush=True)


if __name__ == "__main__":
    main()
