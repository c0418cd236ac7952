"""What an episode's process costs: opening it, and many that are open at once.

    python -m benchmarks.rewards.environments [--live 200] [--waves 1] [--rounds 15] [--kernels 3]
        [--game] [--ways forked-sandbox,…]

The calculator, with `--kernels` the Python interpreter and with `--game` one of TextArena's, in a
process of its own: started or forked from one that has loaded it, alone and in the sandbox by
turns, so that a machine which others use slows all alike. Memory is what processes have resident,
shared pages split (Pss; only root sees it), of every seventh; `keeper` is the thread that watches
over the sandboxes' memory. CPU is of all processes of an episode, and of this one for it.
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
from keel.agents.host.client import Deadlines, Hosted, Program, parent_of
from keel.agents.host.parent import Parent
from keel.agents.host.process import Wrap, not_wrapped
from keel.agents.host.room import make_room
from keel.rewards.sandbox.environments import environment_wrap
from keel.rewards.sandbox.processes import usage
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt

TASK = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "Go."},))
SIX_BY_SEVEN = ToolCall(call_id="c", name="calculate", arguments={"expression": "6 * 7"})
AT_ONCE = 4
REST_S = 5.0


GAME = {"game": "GuessTheNumber-v0", "brief": True}
SAMPLED = 7
"""Memory is read of one process in so many."""


def program(wrap: Wrap, name: str) -> Program:
    return Program(
        target=f"keel.agents.environments.{name}",
        arguments=GAME if name == "textarena_game:Game" else {},
        folder=Path(keel.__file__).parent,
        deadlines=Deadlines(open_s=300),
        wrap=wrap,
    )


def parent_for(way: str, given: Program) -> Parent | None:
    return parent_of(given) if way.startswith("forked") else None


async def open_ms(parent: Parent | None, given: Program) -> tuple[float, float]:
    """And its CPU time."""
    environment = Hosted(given, parent=parent)
    cpu, began = cpu_s(), time.perf_counter()
    await environment.open(TASK, seed=0)
    taken, used = time.perf_counter() - began, cpu_s() - cpu
    await environment.close()
    return taken * 1e3, used * 1e3


async def one_by_one(ways: dict[str, Wrap], name: str, rounds: int) -> None:
    given = {way: program(wrap, name) for way, wrap in ways.items()}
    parents = {way: parent_for(way, given[way]) for way in ways}
    for way in ways:  # which loads what is to be forked
        await open_ms(parents[way], given[way])
    taken: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            ms, cpu = await open_ms(parents[way], given[way])
            taken[way].append(ms)
            used[way].append(cpu)
    for way, parent in parents.items():
        why = parent.why_not if parent is not None else ""
        if parent is not None:
            await parent.close()
        print(
            f"{name}, {way}: opens in {statistics.median(taken[way]):.0f} ms, CPU "
            f"{statistics.mean(used[way]):.0f} ms {why}",
            flush=True,
        )


async def live(way: str, wrap: Wrap, name: str, count: int, waves: int) -> None:
    given = program(wrap, name)
    starting = asyncio.Semaphore(AT_ONCE)
    parent = parent_for(way, given)
    await open_ms(parent, given)
    files = len(os.listdir("/proc/self/fd"))
    kept = below(os.getpid())
    for wave in range(waves):
        environments = [Hosted(given, starting=starting, parent=parent) for _ in range(count)]
        cpu, began = cpu_s(), time.perf_counter()
        await asyncio.gather(*(one.open(TASK, seed=0) for one in environments))
        opened = time.perf_counter() - began
        cpu = 1e3 * (cpu_s() - cpu) / count
        pids = sorted(set(below(os.getpid())) - set(kept))
        taken = statistics.mean(map(pss_mib, pids[::SAMPLED])) * len(pids)
        resting = own_cpu_s()
        await asyncio.sleep(REST_S)
        keeper = (own_cpu_s() - resting) / REST_S
        began = time.perf_counter()
        calls = (e.call(SIX_BY_SEVEN, timeout_s=60) for e in environments)
        if name.startswith("calculator"):
            for result in await asyncio.gather(*calls):
                assert result.text == "42", result
        called = time.perf_counter() - began
        held = len(os.listdir("/proc/self/fd")) - files
        own = resident_mib()
        began = time.perf_counter()
        await asyncio.gather(*(one.close() for one in environments))
        closed = time.perf_counter() - began
        left = set(below(os.getpid())) - set(kept)
        more = len(os.listdir("/proc/self/fd")) - files
        assert not left and more <= 0, (left, more)
        print(
            f"{count} live, {name}, {way}, wave {wave + 1}: opened in {opened:.1f} s, CPU of each "
            f"{cpu:.0f} ms; {len(pids) / count:.0f} processes, {held / count:.0f} files here and "
            f"{taken / count:.1f} MiB each, {own:.0f} MiB here; keeper {100 * keeper:.1f} % of a "
            f"core, a call of all {called:.1f} s, closed in {closed:.1f} s, nothing left",
            flush=True,
        )
    if parent is not None:
        await parent.close()
    assert not below(os.getpid())


def below(pid: int) -> list[int]:
    lists = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(child) for found in lists for child in found]
    return children + [one for child in children for one in below(child)]


def pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def cpu_s() -> float:
    """Of this process and all below it, those that it has reaped included."""
    return usage(os.getpid()).cpu_s


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=200, help="open at once")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", type=int, default=0, help="rounds with a Jupyter kernel")
    parser.add_argument("--waves", type=int, default=1, help="of those that are open at once")
    parser.add_argument("--game", action="store_true", help="a game of TextArena's, too")
    parser.add_argument("--ways", default="", help="only these, with commas between")
    options = parser.parse_args()
    make_room(options.live)
    load = os.getloadavg()[0]
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {load:.1f}, python {sys.version[:7]}"
    )
    sandbox = environment_wrap("bubblewrap")
    assert sandbox is not None
    ways: dict[str, Wrap] = {"started": not_wrapped, "forked": not_wrapped}
    ways |= {"started-sandbox": sandbox, "forked-sandbox": sandbox}
    if options.ways:
        ways = {way: ways[way] for way in options.ways.split(",")}
    for name, rounds in (
        ("calculator:Calculator", options.rounds),
        ("interpreter:Interpreter", options.kernels),
        ("textarena_game:Game", options.rounds * options.game),
    ):
        if rounds:
            asyncio.run(one_by_one(ways, name, rounds))
    name = "textarena_game:Game" if options.game else "calculator:Calculator"
    for way, wrap in ways.items():
        asyncio.run(live(way, wrap, name, options.live, options.waves))


if __name__ == "__main__":
    main()
