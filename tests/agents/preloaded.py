"""An environment whose module creates shared state at import, or fails there."""

import os
import random
import sys
import tempfile

AT_IMPORT = random.random()
IMPORTED_BY = os.getpid()
SEEN: list[str] = []
how = os.environ.get("AT_IMPORT", "")
if how == "thread":
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
if how == "file":
    log = open(__file__)  # noqa: SIM115
if how == "process":
    import subprocess

    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
if how == "memory":
    import mmap

    shared = mmap.mmap(-1, 4096)


class Counter:
    def opening(self, task: dict, seed: int) -> str:
        return f"{seed} {random.random()} {AT_IMPORT}"

    def see(self, word: str) -> list:
        """Return all words that this copy of the module has seen."""
        SEEN.append(word)
        os.environ["WORD"] = word
        return SEEN

    def look(self) -> dict:
        return {
            "forked": os.getpid() != IMPORTED_BY,
            "session": os.getsid(0) == os.getpid(),
            "files": sorted(
                os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
                for name in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{name}")
            ),
            "inherited": [
                int(name)
                for name in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{name}") and os.get_inheritable(int(name))
            ],
            "temporary": tempfile.gettempdir(),
            "word": os.environ.get("WORD"),
        }

    def end(self, how: str) -> str:
        if how == "crash":
            os.kill(os.getpid(), 11)
        if how == "exit":
            os._exit(3)
        if how == "parent":
            os.kill(os.getppid(), 9)
        while how in ("hang", "parent"):
            pass
        return "still here"

    def verdict(self) -> float:
        return 1.0
