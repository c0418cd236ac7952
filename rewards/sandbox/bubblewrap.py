"""Builds the bubblewrap arguments and the seccomp filter that all sandboxes share.

The filter rejects system calls that would bypass the namespaces and limits: calls for memory that
no process limit counts (`memfd_create`, System V shared memory), new namespaces, sockets, the
memory of other processes, and key rings shared between users. It also rejects calls to kernel
interfaces with a history of vulnerabilities.
"""

import errno
import fcntl
import os
import platform
import secrets
import shutil
import signal
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

TMP = "/tmp"
SYSTEM_FILES = [
    word
    for name in ("/etc/ld.so.cache", "/etc/alternatives")
    for word in ("--ro-bind-try", name, name)
]
PROGRAMS = ("bin", "include", "lib", "lib32", "lib64", "libexec", "libx32", "share/zoneinfo")
"""Folders in /usr that programs and compilers need. The other folders could contain answers."""
DEVICES = ("null", "full", "random", "urandom")


class IsolationError(ValueError):
    """Raised if this machine can't isolate programs."""


def check_machine(setting: str) -> None:
    """Raise IsolationError, which begins with `setting`, if system calls can't be filtered on this
    machine's processor."""
    if (machine := platform.machine()) != _MACHINE:
        problem = f"sandboxes need {_MACHINE}, and this machine is {machine}"
        raise IsolationError(f"{setting} does not work here: {problem}")


def namespace_args(root: bool, *, network: bool = False) -> list[str]:
    """Return the bubblewrap arguments that run a program in new namespaces with no capabilities.

    If `root` is set, bubblewrap keeps the capabilities it needs to switch to another user (see
    `drop_privileges_args`).
    """
    words = ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if not network:
        words.append("--unshare-net")
    words += ["--cap-drop", "ALL"]
    if not root:
        return [*words, "--unshare-user"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        words += ["--cap-add", capability]
    return words


def system_args(folders: Sequence[str] = ()) -> list[str]:
    """Return the bubblewrap arguments that mount folders under /usr read-only. Without `folders`,
    all of /usr is mounted."""
    words = ["--ro-bind", "/usr", "/usr"]
    if folders:
        words = ["--perms", "0755", "--dir", "/usr"]
        words += folder_args(str(Path("/usr", f).parent) for f in folders if "/" in f)
        for name in folders:
            words += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
    for name in ("bin", "lib", "lib64"):
        if Path(f"/{name}").is_symlink():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        else:
            words += ["--ro-bind-try", f"/{name}", f"/{name}"]
    return words


def folder_args(folders: Iterable[str]) -> list[str]:
    """Return the bubblewrap arguments that create mount points. Folders that bubblewrap creates on
    its own are only accessible to root."""
    words: list[str] = []
    created: set[str] = set()
    for folder in folders:
        for parent in (*reversed(Path(folder).parents[:-1]), Path(folder)):
            if str(parent) not in created:
                created.add(str(parent))
                words += ["--perms", "0755", "--dir", str(parent)]
    return words


def device_args(names: Sequence[str] = (*DEVICES, "zero")) -> list[str]:
    return [word for n in names for word in ("--dev-bind", f"/dev/{n}", f"/dev/{n}")]


def private_folder_args(folder: str, mib: int) -> list[str]:
    return ["--perms", "1777", "--size", str(mib << 20), "--tmpfs", folder]


def drop_privileges_args(root: bool) -> list[str]:
    """Return a command prefix that drops root privileges inside the sandbox."""
    if not root:
        return []
    # A random unused user ID, so that per-user limits apply to a single run.
    spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max((tuple(map(int, span)) for span in spans), key=lambda span: span[2])
    user = str(first + count // 4 + secrets.randbelow(count // 4))
    words = [tool("setpriv"), "--reuid", user, "--regid", user, "--clear-groups"]
    return [*words, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin")
    if path is None:
        raise RuntimeError(f"{name} is not installed")
    return path


def memory_file(stack: ExitStack, data: bytes) -> int:
    """Write `data` to a sealed in-memory file and return a read-only file descriptor for it."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fd = os.memfd_create("keel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, read_only)
    return read_only


_PROBE = """
import ctypes, os, socket
holes = ["is root"] if os.getuid() == 0 else []
if os.path.exists("/proc/self") if STRICT else os.getpid() > 9:
    holes.append("sees processes")
for folder in ("/", "/box", "/dev", "/etc", "/usr", "/usr/lib"):
    try:
        open(folder + "/probe", "w")
        holes.append("writes to " + folder)
    except OSError:
        pass
open("/tmp/probe", "w").close()
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family > 10 else socket.SOCK_STREAM).close()
        if family > 10 or NETWORK == "none":
            holes.append("opens sockets of " + str(family))
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).close()
    holes += ["opens Unix sockets"] * STRICT
except OSError:
    if not STRICT:
        raise
if NETWORK == "loopback":
    socket.create_server(("127.0.0.1", 0)).close()
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
        holes.append("has a way to other machines")
    except OSError:
        pass
try:
    os.memfd_create("probe")
    holes.append("has memory that is not counted")
except OSError:
    pass
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    holes.append("makes namespaces")
held = os.pipe()
try:
    for _ in range(PROCESSES + 8):
        if os.fork() == 0:
            os.read(held[0], 1)
    holes.append("starts processes without limit")
except OSError:
    pass
os.write(1, ("a program inside " + ", ".join(holes)).encode() if holes else b"isolated")
os._exit(0)
"""


def probe_code(*, network: str, processes: int, strict: bool) -> str:
    """Return Python code that tries to break out of the sandbox and prints `isolated` if it can't.

    Set `strict` for program sandboxes, which have no /proc and no sockets.
    """
    return f"STRICT, NETWORK, PROCESSES = {strict!r}, {network!r}, {processes!r}{_PROBE}"


def _parse_table(text: str) -> dict[str, int]:
    """Parse a table of x86_64 system calls and their numbers, from the kernel's syscall_64.tbl."""
    return {name: int(number) for name, number in (row.split() for row in text.split(";"))}


_DENIED = _parse_table("""
acct 163; add_key 248; bpf 321; chroot 161; delete_module 176; fanotify_init 300;
finit_module 313; fsconfig 431; fsmount 432; fsopen 430; fspick 433; init_module 175;
io_uring_enter 426; io_uring_register 427; io_uring_setup 425; kcmp 312; kexec_file_load 320;
kexec_load 246; keyctl 250; lookup_dcookie 212; memfd_create 319; memfd_secret 447;
migrate_pages 256; mount 165; mount_setattr 442; move_mount 429; move_pages 279; mq_open 240;
msgctl 71; msgget 68; msgrcv 70; msgsnd 69; name_to_handle_at 303; open_by_handle_at 304;
open_tree 428; perf_event_open 298; personality 135; pidfd_getfd 438; pivot_root 155;
process_vm_readv 310; process_vm_writev 311; ptrace 101; quotactl 179; reboot 169;
request_key 249; semctl 66; semget 64; semop 65; semtimedop 220; setns 308; shmat 30; shmctl 31;
shmget 29; socket 41; swapoff 168; swapon 167; syslog 103; umount2 166; unshare 272;
userfaultfd 323; vmsplice 278
""")
_UNKNOWN = 453  # first number after these tables (Linux 6.6). C libraries fall back to older calls.
_UNCOUNTED = _parse_table("""
ioprio_set 251; sched_setaffinity 203; sched_setattr 314; sched_setparam 142;
sched_setscheduler 144; sendmmsg 307; sendmsg 46; setpriority 141; setsockopt 54
""")
"""System calls that are rejected if memory and CPU time are measured from outside. A socket pair
holds about 200 KiB that are not counted, and more with larger buffers or sockets in transit."""
_PRETENDED = _parse_table("""
futimesat 261; utime 132; utimensat 280; utimes 235
""")
"""System calls that succeed without doing anything, because they would change timestamps of
devices."""
_MMAP, _RT_SIGACTION, _CLONE, _PRLIMIT64, _CLONE3 = 9, 13, 56, 302, 435

_MACHINE, _AUDIT_ARCH = "x86_64", 0xC000003E
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_FOURTH_ARGUMENT = _FIRST_ARGUMENT + 3 * 8
_SHARED_ANONYMOUS = 0x01 | 0x20  # mmap(2)
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED, _MISSING = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
# ZeroMQ aborts at any other error for a socket family.
_NO_FAMILY = _ERRNO | errno.EOPNOTSUPP


def seccomp_filter(
    *, sockets: Sequence[int] = (), permitted: Sequence[str] = (), counted: bool = False
) -> bytes:
    """Build a classic BPF program for `bwrap --seccomp` on x86_64.

    `sockets` lists the allowed socket families. `permitted` lists system calls to allow that the
    filter would normally reject. If `counted` is set, system calls that hide memory or CPU time
    from measurement are rejected too.
    """
    program = [
        (_LOAD, 0, 0, _ARCH),
        *_return_unless(_EQUAL, _AUDIT_ARCH, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_return_if(_AT_LEAST, _UNKNOWN, _MISSING),
    ]
    for name, number in _DENIED.items():
        if name not in permitted and (name != "socket" or not sockets):
            program += _return_if(_EQUAL, number, _REFUSED)
    # Its flags are behind a pointer that a filter cannot follow; C libraries fall back to clone.
    program += _return_if(_EQUAL, _CLONE3, _MISSING)
    if sockets:
        allowed = [each for family in sockets for each in _return_if(_EQUAL, family, _ALLOW)]
        # The family is an `int`: the kernel also reads only the lower half of the argument.
        program += _check(_DENIED["socket"], *allowed, last=_NO_FAMILY)
    if counted:
        for number in _UNCOUNTED.values():
            program += _return_if(_EQUAL, number, _REFUSED)
        for number in _PRETENDED.values():
            program += _return_if(_EQUAL, number, _ERRNO)
        # The CPU time of children is lost if their parent ignores SIGCHLD.
        program += _check(_RT_SIGACTION, *_return_if(_EQUAL, signal.SIGCHLD, _REFUSED))
        # Shared anonymous memory counts for no process once it is unmapped.
        mask = (_AND, 0, 0, _SHARED_ANONYMOUS)
        shared = _return_if(_EQUAL, _SHARED_ANONYMOUS, _REFUSED)
        program += _check(_MMAP, mask, *shared, argument=_FOURTH_ARGUMENT)
        program += _check(_PRLIMIT64, *_return_unless(_EQUAL, 0, _REFUSED))
    program += _check(_CLONE, *_return_if(_BITS, _NEW_NAMESPACES, _REFUSED))
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instruction = tuple[int, int, int, int]


def _check(
    number: int, *checks: _Instruction, argument: int = _FIRST_ARGUMENT, last: int = _ALLOW
) -> list[_Instruction]:
    """Return instructions that run `checks` on an argument of a system call and then return
    `last`."""
    body = [(_LOAD, 0, 0, argument), *checks, (_RETURN, 0, 0, last)]
    return [(_EQUAL, 0, len(body), number), *body]


def _return_if(test: int, value: int, action: int) -> tuple[_Instruction, _Instruction]:
    return (test, 0, 1, value), (_RETURN, 0, 0, action)


def _return_unless(test: int, value: int, action: int) -> tuple[_Instruction, _Instruction]:
    return (test, 1, 0, value), (_RETURN, 0, 0, action)
