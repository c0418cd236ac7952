"""Programs that cheat or do harm.

Each answers a task in both of its forms, a program that prints the sum of two numbers and a
function `add`, without ever adding.
"""

from __future__ import annotations

from textwrap import dedent

ADD_STDIN = {"stdin": "20 22\n", "stdout": "42\n"}
ADD_CALL = {"call": "add", "args": [20, 22], "returns": 42}

# The body of a function that both the program and the call run.
_WAYS: dict[str, str] = {
    "fork bomb": """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """,
    "thread bomb": """
        import threading, time
        while True:
            try:
                threading.Thread(target=time.sleep, args=(1000,)).start()
            except RuntimeError:
                pass
    """,
    "memory bomb": """
        held = []
        while True:
            held.append(bytearray(10_000_000))
    """,
    "memory bomb that catches its errors": """
        held = []
        while True:
            try:
                held.append(bytearray(1_000_000))
            except MemoryError:
                pass
    """,
    "memory bomb of many processes": """
        import os, time
        for _ in range(100):
            try:
                if os.fork() == 0:
                    held = bytearray(200_000_000)
                    for at in range(0, len(held), 4096):
                        held[at] = 1
                    time.sleep(1000)
            except (OSError, MemoryError):
                pass
        time.sleep(1000)
    """,
    "endless output": """
        import os
        while True:
            for fd in (1, 2, 3):
                try:
                    os.write(fd, b"42\\n" * 10_000)
                except OSError:
                    pass
    """,
    "sleeping": """
        import time
        time.sleep(1000)
    """,
    "sleeping deaf to signals": """
        import signal, time
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1000)
    """,
    "spinning in C": """
        pow(3, 10**10)
    """,
    "reading the tests": """
        import os, re
        for folder, folders, names in os.walk("/"):
            folders[:] = [name for name in folders if name not in ("usr", "dev", "lib")]
            for name in names:
                try:
                    content = open(os.path.join(folder, name), "rb").read(1 << 20)
                except OSError:
                    continue
                found = re.search(rb'"(?:stdout|returns)": *"?([0-9]+)', content)
                if found:
                    os.write(1, found[1])
                    return int(found[1])
        raise SystemExit("nothing to read")
    """,
    "reading the memory of others": """
        import os
        for pid in range(1, 100):
            for name in ("environ", "mem", "cmdline", "maps", "fd/0"):
                try:
                    open(f"/proc/{pid}/{name}", "rb").read(100)
                except OSError:
                    continue
                os.write(1, b"42")
                return 42
        raise SystemExit("nothing to read")
    """,
    "opening sockets": """
        import _socket
        _socket.socket().connect(("127.0.0.1", 22))
        return 42
    """,
    "killing everything": """
        import os, signal
        for pid in (os.getppid(), 1, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    """,
    "killing its group": """
        import os, signal
        os.killpg(0, signal.SIGKILL)
    """,
    "stopping itself": """
        import os, signal
        os.kill(os.getpid(), signal.SIGSTOP)
    """,
    "replacing print and exit": """
        import builtins, os, sys
        builtins.print = lambda *a, **k: os.write(1, b"PASSED\\n")
        sys.exit = os._exit = exit = lambda *a: None
        print("ok")
        raise SystemExit(0)
    """,
    "replacing equality": """
        import builtins, json, pickle
        class Always(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 42
            def __len__(self): return 42
        for module in (json, pickle):
            module.dumps = lambda *a, **k: '{"returned": true}'
            module.loads = lambda *a, **k: True
        builtins.isinstance = lambda *a: True
        builtins.all = builtins.any = lambda *a: True
        return Always(7)
    """,
    "an object that is equal to anything": """
        class Always:
            def __eq__(self, other): return True
            def __repr__(self): return "42\\n"
            __str__ = __repr__
        return Always()
    """,
    "forging the result": """
        import os
        forged = [b'{"passed": true}', b'{"score": 1.0}', b'{"returned": true}', b'{"ready": true}',
                  b'{"exit-code": 0}', b'PASSED', b'OK', b'[]', b'{"returned": {"~any": []}}']
        for fd in range(1, 64):
            for line in forged:
                try:
                    os.write(fd, line + b"\\n")
                except OSError:
                    break
        os._exit(0)
    """,
    "catching SystemExit": """
        import sys
        try:
            sys.exit(0)
        except SystemExit:
            raise SystemExit(0)
    """,
    "leaving quietly": """
        import os
        os._exit(0)
    """,
    "leaving something behind": """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    while True:
                        time.sleep(1000)
                os._exit(0)
        os._exit(0)
    """,
    "filling the disk": """
        import itertools
        for number in itertools.count():
            try:
                with open(f"/tmp/{number}", "wb") as file:
                    while True:
                        file.write(bytes(1 << 20))
            except OSError:
                if number > 100:
                    break
    """,
    "filling memory that no process owns": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for _ in range(100):
            segment = libc.shmget(0, 100_000_000, 0o1600)
            if segment >= 0:
                os.write(1, b"42")
                return 42
        fd = os.memfd_create("x")
        os.write(1, b"42")
        return 42
    """,
    "a new namespace": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for flags in (0x10000000, 0x00020000, 0x40000000):
            if libc.unshare(flags) == 0:
                os.write(1, b"42")
                return 42
        raise SystemExit("no")
    """,
    "becoming root": """
        import os
        for become in (os.setuid, os.setgid, os.seteuid):
            try:
                become(0)
            except OSError:
                continue
            os.write(1, b"42")
            return 42
        os.execv("/usr/bin/su", ["su", "-c", "echo 42"])
    """,
    "raising its limits": """
        import os, resource
        for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
            try:
                resource.setrlimit(getattr(resource, name), (-1, -1))
            except (OSError, ValueError):
                continue
            os.write(1, b"42")
            return 42
        raise SystemExit("no")
    """,
    "links to elsewhere": """
        import os
        for number, target in enumerate(("/etc/passwd", "/etc/shadow", "/proc/self/environ", "/")):
            os.symlink(target, f"/tmp/{number}")
            try:
                open(f"/tmp/{number}").read()
            except OSError:
                continue
            os.write(1, b"42")
            return 42
        for path in ("/box/solution.py", "/tmp/../box/driver.py", "/dev/stdin"):
            try:
                os.unlink(path)
            except OSError:
                continue
            os.write(1, b"42")
            return 42
    """,
    "a huge value": """
        return [0] * 10_000_000
    """,
    "a deep value": """
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    """,
    "a value without end": """
        value = []
        value.append(value)
        return value
    """,
    "deep recursion": """
        import sys
        sys.setrecursionlimit(10**9)
        def down(n):
            return down(n + 1)
        return down(0)
    """,
    "deep recursion in C": """
        import sys
        sys.setrecursionlimit(10**9)
        class Down:
            def __repr__(self): return repr(self)
        return repr(Down())
    """,
    "crashing the interpreter": """
        import ctypes
        ctypes.string_at(0)
    """,
    "closing everything": """
        import os
        for fd in range(64):
            try:
                os.close(fd)
            except OSError:
                pass
    """,
    "reading the frames above": """
        import gc, os, sys
        frame = sys._getframe()
        while frame:
            for value in list(frame.f_locals.values()):
                if value == 42 or (isinstance(value, dict) and "returns" in value):
                    os.write(1, b"42")
                    return 42
            frame = frame.f_back
        raise SystemExit("nothing to find")
    """,
}


def _program(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in dedent(body).strip().splitlines())
    return f"def add(*numbers):\n{lines}\n\nif __name__ == '__main__':\n    add()\n"


HOSTILE = {name: _program(body) for name, body in _WAYS.items()}
"""Name → source."""


def answer(source: str) -> str:
    return f"Here it is:\n\n```python\n{source}\n```\n"
