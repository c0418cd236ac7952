"""Builds the bubblewrap arguments and the seccomp filter that all sandboxes share.

The filter rejects system calls that would bypass the namespaces and limits: calls for memory that
no process limit counts (`memfd_create`, System V shared memory), new namespaces, sockets, the
memory of other processes, and key rings shared between users. It also rejects calls to kernel
interfaces with a history of vulnerabilities.
"""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
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


_Numbers = Mapping[str, tuple[int, ...]]


def _parse_table(text: str) -> _Numbers:
    """Parse a table of system calls. Each entry `name number number;` gives the numbers on x86_64
    and aarch64, or -1 if there is none. The numbers come from the kernel's syscall_64.tbl and
    asm-generic/unistd.h."""
    rows = (row.split() for row in text.split(";"))
    return {name: tuple(map(int, numbers)) for name, *numbers in rows}


_DENIED = _parse_table("""
acct 163 89; add_key 248 217; bpf 321 280; chroot 161 51; delete_module 176 106;
fanotify_init 300 262; finit_module 313 273; fsconfig 431 431; fsmount 432 432; fsopen 430 430;
fspick 433 433; init_module 175 105; io_uring_enter 426 426; io_uring_register 427 427;
io_uring_setup 425 425; kcmp 312 272; kexec_file_load 320 294; kexec_load 246 104;
keyctl 250 219; lookup_dcookie 212 18; memfd_create 319 279; memfd_secret 447 447;
migrate_pages 256 238; mount 165 40; mount_setattr 442 442; move_mount 429 429;
move_pages 279 239; mq_open 240 180; msgctl 71 187; msgget 68 186; msgrcv 70 188; msgsnd 69 189;
name_to_handle_at 303 264; open_by_handle_at 304 265; open_tree 428 428; perf_event_open 298 241;
personality 135 92; pidfd_getfd 438 438; pivot_root 155 41; process_vm_readv 310 270;
process_vm_writev 311 271; ptrace 101 117; quotactl 179 60; reboot 169 142; request_key 249 218;
semctl 66 191; semget 64 190; semop 65 193; semtimedop 220 192; setns 308 268; shmat 30 196;
shmctl 31 195; shmget 29 194; socket 41 198; swapoff 168 225; swapon 167 224; syslog 103 116;
umount2 166 39; unshare 272 97; userfaultfd 323 282; vmsplice 278 75
""")
_UNKNOWN = 453  # first number after these tables (Linux 6.6). C libraries fall back to older calls.
_UNCOUNTED = _parse_table("""
ioprio_set 251 30; sched_setaffinity 203 122; sched_setattr 314 274; sched_setparam 142 118;
sched_setscheduler 144 119; sendmmsg 307 269; sendmsg 46 211; setpriority 141 140;
setsockopt 54 208
""")
"""System calls that are rejected if memory and CPU time are measured from outside. A socket pair
holds about 200 KiB that are not counted, and more with larger buffers or sockets in transit."""
_PRETENDED = _parse_table("""
futimesat 261 -1; utime 132 -1; utimensat 280 88; utimes 235 -1
""")
"""System calls that succeed without doing anything, because they would change timestamps of
devices."""
_MMAP = (9, 222)
_PRLIMIT64 = (302, 261)
_RT_SIGACTION = (13, 134)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_MACHINES = {"x86_64": 0, "aarch64": 1}
LOCAL = (socket.AF_UNIX,)
FORKING = ("mount", "unshare")  # what a process needs to move its children into new namespaces
NETWORK = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_X32 = 0x40000000  # bit of a second call table on x86_64

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_FOURTH_ARGUMENT = _FIRST_ARGUMENT + 3 * 8
_SHARED, _ANONYMOUS = 0x01, 0x20  # mmap(2)
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(
    machine: str,
    *,
    sockets: Sequence[int] = (),
    permitted: Sequence[str] = (),
    counted: bool = False,
) -> bytes:
    """Build a classic BPF program for `bwrap --seccomp`. Raises ValueError if the system call
    numbers of `machine` (`platform.machine()`) are unknown.

    `sockets` lists the allowed socket families. `permitted` lists system calls to allow that the
    filter would normally reject. If `counted` is set, system calls that hide memory or CPU time
    from measurement are rejected too.
    """
    if machine not in _MACHINES:
        raise ValueError(f"no system call table for {machine}, only {', '.join(_MACHINES)}")
    column = _MACHINES[machine]
    refused = _ERRNO | errno.EPERM
    missing = _ERRNO | errno.ENOSYS
    program = [
        (_LOAD, 0, 0, _ARCH),
        *_return_unless(_EQUAL, _AUDIT_ARCH[column], _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += _return_if(_AT_LEAST, _X32, missing)
    program += _return_if(_AT_LEAST, _UNKNOWN, missing)
    for name, numbers in _DENIED.items():
        if name not in permitted and (name != "socket" or not sockets):
            program += _return_if(_EQUAL, numbers[column], refused)
    # Its flags are behind a pointer that a filter cannot follow; C libraries fall back to clone.
    program += _return_if(_EQUAL, _CLONE3[column], missing)
    if sockets:
        allowed = [
            instruction for family in sockets for instruction in _return_if(_EQUAL, family, _ALLOW)
        ]
        # The family is an `int`: the kernel also reads only the lower half of the argument. The
        # error says that the family is missing: ZeroMQ aborts at any other.
        absent = _ERRNO | errno.EOPNOTSUPP
        check = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *allowed, (_RETURN, 0, 0, absent)]
        program += [(_EQUAL, 0, len(check), _DENIED["socket"][column]), *check]
    if counted:
        program += _accounting_rules(column, refused)
    program += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *_return_if(_BITS, _NEW_NAMESPACES, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instruction = tuple[int, int, int, int]


def _accounting_rules(column: int, refused: int) -> list[_Instruction]:
    program: list[_Instruction] = []
    for numbers in _UNCOUNTED.values():
        program += _return_if(_EQUAL, numbers[column], refused)
    for numbers in _PRETENDED.values():
        if numbers[column] >= 0:
            program += _return_if(_EQUAL, numbers[column], _ERRNO)
    # The CPU time of children is lost if their parent ignores SIGCHLD.
    check = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *_return_if(_EQUAL, signal.SIGCHLD, refused)]
    program += [(_EQUAL, 0, len(check) + 1, _RT_SIGACTION[column]), *check, (_RETURN, 0, 0, _ALLOW)]
    # Shared anonymous memory counts for no process once it is unmapped.
    both = _SHARED | _ANONYMOUS
    check = [
        (_LOAD, 0, 0, _FOURTH_ARGUMENT),
        (_AND, 0, 0, both),
        *_return_if(_EQUAL, both, refused),
    ]
    program += [(_EQUAL, 0, len(check) + 1, _MMAP[column]), *check, (_RETURN, 0, 0, _ALLOW)]
    check = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *_return_unless(_EQUAL, 0, refused)]
    program += [(_EQUAL, 0, len(check) + 1, _PRLIMIT64[column]), *check, (_RETURN, 0, 0, _ALLOW)]
    return program


def _return_if(test: int, value: int, action: int) -> tuple[_Instruction, _Instruction]:
    return (test, 0, 1, value), (_RETURN, 0, 0, action)


def _return_unless(test: int, value: int, action: int) -> tuple[_Instruction, _Instruction]:
    return (test, 1, 0, value), (_RETURN, 0, 0, action)
