"""A Ray cluster of two nodes on one machine, whose network can be cut: the second node is in a
network namespace of its own, joined to the first by a bridge. Needs root, and `ip`.

Ranks, which take a core, are on the second node, since the first has none to give; engines are on
either, by chance. The second node has a hostname of its own, and shares everything else with the
first: processes, files, `/dev/shm`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import psutil

BRIDGE, CABLE, SPACE = "keelbr", "keelcable", "keelnode2"
HEAD, SECOND, NAME = "10.77.0.1", "10.77.0.2", "node2"
PORT = 6377
MARK = "KEEL_CHAOS_CLUSTER"
"""Environment variable of all that a cluster has started, with its folder."""
COMMAND_S, START_S = 20.0, 120.0
STORE = f"--object-store-memory={512 * 2**20}"
INSIDE = (
    *("ip", "netns", "exec", SPACE),
    *("unshare", "--uts", "sh", "-c", f'hostname {NAME}; exec "$@"', "sh"),
)
ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


def lacking() -> str:
    """Why there can be no second node here; "" if there can."""
    if os.geteuid():
        return "a second node needs root, for a network namespace"
    return "" if shutil.which("ip") else "a second node needs `ip` (iproute2)"


class Cluster:
    """The nodes, started."""

    def __init__(self, folder: Path, more: Mapping[str, str]) -> None:
        """folder: for Ray's files; its sockets need a short path. more: environment of all that
        runs on it."""
        self._folder, self._more = folder, more
        self._ray = Path(sys.executable).with_name("ray")
        for words in (
            f"netns add {SPACE}",
            f"link add {BRIDGE} type bridge",
            f"addr add {HEAD}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
            f"link add {CABLE} type veth peer name eth0 netns {SPACE}",
            f"link set {CABLE} master {BRIDGE} up",
            f"-n {SPACE} link set lo up",
            f"-n {SPACE} addr add {SECOND}/24 dev eth0",
            f"-n {SPACE} link set eth0 up",
        ):
            ip(words)
        self._start(
            *("--head", f"--port={PORT}", f"--node-ip-address={HEAD}", "--num-cpus=0"),
            *("--include-dashboard=false", f"--temp-dir={folder}"),
        )
        self.start_second()

    @property
    def environment(self) -> dict[str, str]:
        """Of a run on it."""
        return {"RAY_ADDRESS": f"{HEAD}:{PORT}", **ENVIRONMENT}

    def start_second(self) -> None:
        self._start(
            *(f"--address={HEAD}:{PORT}", f"--node-ip-address={SECOND}", "--num-cpus=2"),
            before=INSIDE,
        )

    def cut(self) -> None:
        """No packet comes through from here on, and nobody is told."""
        ip(f"link set {CABLE} down")

    def mend(self) -> None:
        ip(f"link set {CABLE} up")

    def on_second(self) -> list[psutil.Process]:
        """All processes there, whoever has started them and whether that is gone or not."""
        space = os.stat(f"/run/netns/{SPACE}")
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                theirs = os.stat(f"/proc/{process.pid}/ns/net")
                if theirs.st_ino == space.st_ino and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def on_first(self) -> list[psutil.Process]:
        """Ray's own processes on the first node, and what they have started."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self._folder):
                    found.append(process)
        return found

    def end(self) -> None:
        for process in {*self.on_second(), *self.on_first()}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        remove_network()

    def _start(self, *options: str, before: tuple[str, ...] = ()) -> None:
        # A file, since the node goes on holding it.
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(
                [*before, str(self._ray), "start", STORE, *options],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._more, **ENVIRONMENT, MARK: str(self._folder)},
                timeout=START_S,
            )
            said.seek(0)
            if done.returncode:
                raise RuntimeError(f"ray start {' '.join(options)}: {said.read()}")


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise RuntimeError(f"ip {words}: {done.stderr.strip()}")


def remove_network() -> None:
    for words in (f"link del {CABLE}", f"link del {BRIDGE}", f"netns del {SPACE}"):
        with suppress(RuntimeError):
            ip(words)


@contextmanager
def two_nodes(more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Cluster]:
    """Ended, with all that runs on it and with its network, at exit."""
    remove_network()  # of one that was killed
    folder = Path(tempfile.mkdtemp(prefix="keel2-", dir="/tmp"))
    cluster = None
    try:
        cluster = Cluster(folder, more)
        yield cluster
    finally:
        if cluster is not None:
            cluster.end()
        else:
            remove_network()
        shutil.rmtree(folder, ignore_errors=True)
