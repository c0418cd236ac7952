"""An environment that attacks its sandbox. Each method reports its success."""

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path


def refused(work) -> str:
    """Return the name of the error, or "" on success."""
    try:
        work()
    except (OSError, MemoryError, ValueError) as error:
        return type(error).__name__ + (f" {error.errno}" if isinstance(error, OSError) else "")
    return ""


class Attacker:
    def attempts(self, secret: str, abstract: str, outside: list[str]) -> dict:
        """Try every attack that does not end the process."""
        here = os.getcwd()
        libc = ctypes.CDLL(None, use_errno=True)
        results = {
            "environment": sorted(os.environ),
            "secret": secret in str(dict(os.environ)) or self._in_proc(secret),
            "internet": refused(lambda: socket.socket(socket.AF_INET)),
            "netlink": refused(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
            "local": refused(lambda: socket.socket(socket.AF_UNIX).bind("/tmp/socket")),
            "abstract": refused(lambda: socket.socket(socket.AF_UNIX).connect("\0" + abstract)),
            "seen": [path for path in outside if os.path.exists(path) and os.listdir(path)],
            "processes": sorted(int(one) for one in os.listdir("/proc") if one.isdigit()),
            "written": [
                folder
                for folder in (here, "/", "/usr", "/etc", "/dev", "/root", os.path.dirname(here))
                if not refused(lambda folder=folder: open(f"{folder}/x", "w").close())
            ],
            "ended first": Path("/proc/self/oom_score_adj").read_text().strip(),
            "first killed": refused(lambda: os.kill(1, 9)),
            "root": refused(lambda: os.setuid(0)) if os.getuid() else "is root",
            "limits": refused(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))),
            "memory": refused(lambda: bytearray(1 << 40)),
            "files": refused(lambda: [os.open("/dev/null", 0) for _ in range(2000)]),
        }
        os.closerange(20, 2000)
        calls = {
            "unshare": (0x10000000,),
            "ptrace": (16, os.getppid(), 0, 0),
            "memfd_create": (b"x", 0),
            "mount": (b"/tmp", b"/tmp", b"", 4096, 0),
            "chroot": (b"/tmp",),
        }
        for name, arguments in calls.items():
            results[name] = getattr(libc, name)(*arguments) == -1 and ctypes.get_errno()
        return results

    def _in_proc(self, secret: str) -> bool:
        for one in os.listdir("/proc"):
            with contextlib.suppress(OSError), open(f"/proc/{one}/environ", "rb") as file:
                if secret.encode() in file.read():
                    return True
        return False

    def leave(self, word: str) -> list:
        """Leave traces, after looking for other episodes' traces."""
        place, traces = "/keel-trace", []
        for folder in ("/tmp", "/dev/shm", "/dev/pts"):
            traces += [f"{folder}/{one}" for one in sorted(os.listdir(folder)) if one != "ptmx"]
        traces = [one for one in traces if not __file__.startswith(one + "/")]  # a checkout in /tmp
        for folder in ("/tmp", "/dev/shm"):
            Path(folder + place).write_text(word)
        self._terminal = os.openpty()
        listener = socket.socket(socket.AF_UNIX)
        traces += [refused(lambda: listener.bind("\0trace"))]
        listener.listen()
        self._listener = listener
        return [*traces, *(one for one in os.listdir("/proc") if one.isdigit())]

    def kill_all(self) -> str:
        return refused(lambda: os.kill(-1, 10)) + refused(lambda: os.kill(3, 9))

    def write_to_its_parent(self) -> str:
        """Attack the process that computes the verdict, as the policy's code could."""
        code = (
            "import os\n"
            "try: open(f'/proc/{os.getppid()}/mem', 'r+b'); print('opened')\n"
            "except OSError as error: print(type(error).__name__)"
        )
        done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
        return done.stdout.strip() or done.stderr

    def fill(self, folder: str) -> int:
        """Fill a folder and return the MiB that fit."""
        block, written = bytes(1 << 20), 0
        try:
            with open(f"{folder}/full", "wb", buffering=0) as file:
                while written < 1000:
                    written += file.write(block) >> 20
        except OSError:
            pass
        os.unlink(f"{folder}/full")
        return written

    def fork_bomb(self) -> int:
        """Return the number of processes that could be started. Each leaves the session."""
        made = 0
        while made < 1000:
            try:
                pid = os.fork()
            except OSError:
                break
            if pid == 0:
                os.setsid()
                os.execv("/bin/sleep", ["sleep", f"1001.{os.environ['MINE']}"])
            made += 1
        return made

    def flee(self) -> str:
        """Start a daemon that ignores signals."""
        long = f"sleep 1000.{os.environ['MINE']}"
        trap = f"trap '' HUP INT TERM; {long} & {long}"
        subprocess.Popen(
            ["/bin/sh", "-c", f'(setsid /bin/sh -c "{trap}" &) &'], start_new_session=True
        )
        return "gone"

    def crash(self) -> str:
        os.kill(os.getpid(), 11)
        return ""

    def hang(self) -> str:
        time.sleep(1000)
        return ""

    def memory_bomb(self) -> str:
        """Exceed the memory limit with processes that are each below it."""
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(80 << 20)
                held[:: 1 << 12] = bytes(len(held[:: 1 << 12])).replace(b"\0", b"x")
                time.sleep(1000)
        time.sleep(1000)
        return ""

    def verdict(self, messages: list) -> float:
        return 1.0
