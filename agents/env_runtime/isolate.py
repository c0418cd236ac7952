"""Isolates a forked process in the same way as bubblewrap isolates a process that it starts. The
process keeps the mounts of the sandbox in which it runs. Two user namespaces are nested: the
process is root in the outer one, because mounting pseudo-terminals requires it, and the original
user in the inner one. See user_namespaces(7), pid_namespaces(7) and seccomp(2)."""

from __future__ import annotations

import base64
import ctypes
import fcntl
import os
import re
import resource
import shutil
import socket
import stat
import struct
from typing import Any, Optional

Inner = dict[str, Any]
"""Settings: own_network, loopback, files_mib (the size of /tmp and of /dev/shm), processes and
filter (base64)."""

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND_ALL, _REMOUNT_READ_ONLY = 2, 4, 8, 4096 | 16384, 32 | 1
_SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVILEGES = 4, 22, 38
_FILTER_MODE = 2
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_CAPABILITIES_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def unshare(inner: Inner) -> None:
    """Create new namespaces. The next child of this process becomes the first process in them."""
    uid, gid = os.getuid(), os.getgid()
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # or the maps are not writable
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS
    if inner["own_network"]:
        flags |= _NEW_NETWORK
    _check(_libc.unshare(flags), "unshare")
    _map_user((0, uid), (0, gid))


def isolate(inner: Inner, uid: int, gid: int) -> None:
    """Mount private folders and drop all privileges. Call this in the first process of the
    namespaces."""
    size = b"mode=1777,size=%d" % (inner["files_mib"] << 20)
    _mount_private_tmp(size)
    _mount(b"tmpfs", b"/dev/shm", _NOSUID | _NODEV, size)
    terminals = b"newinstance,ptmxmode=0666,mode=620"
    _mount(b"devpts", b"/dev/pts", _NOSUID | _NOEXEC, terminals)
    _mount(b"proc", b"/proc", _NOSUID | _NODEV | _NOEXEC, None)
    if inner["loopback"]:
        with socket.socket() as handle:
            fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_AND_RUNNING))
    _check(_libc.unshare(_NEW_USER), "unshare")
    _map_user((uid, 0), (gid, 0))
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    program = base64.b64decode(inner["filter"])
    rules = _Filter(len(program) // 8, program)
    _check(_libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(rules), 0, 0), "seccomp")
    # The first process of a user namespace counts too.
    resource.setrlimit(resource.RLIMIT_NPROC, (inner["processes"] + 1,) * 2)


def _mount_private_tmp(options: bytes) -> None:
    """Mount a private /tmp. It contains the files created at import and the mounts below the old
    /tmp."""
    previous = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    mounted = {path: os.open(path, os.O_PATH) for path in _mounts_below("/tmp")}
    tops = {"/".join(path.split("/")[:3]) for path in mounted}
    here = f"/proc/self/fd/{previous}"

    def mount_points(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if folder == here and f"/tmp/{name}" in tops}

    _mount(b"tmpfs", b"/tmp", _NOSUID | _NODEV, options)
    shutil.copytree(here, "/tmp", symlinks=True, ignore=mount_points, dirs_exist_ok=True)
    for top in tops - set(mounted):  # made read-only below, as they were
        os.mkdir(top)
        _mount(b"tmpfs", os.fsencode(top), _NOSUID | _NODEV, b"mode=755")
    for path, fd in mounted.items():
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        source = f"/proc/self/fd/{fd}".encode()
        _check(_libc.mount(source, os.fsencode(path), None, _BIND_ALL, None), f"bind {path}")
        os.close(fd)
    for top in tops - set(mounted):
        _mount(b"tmpfs", os.fsencode(top), _NOSUID | _NODEV | _REMOUNT_READ_ONLY, b"mode=755")
    os.close(previous)


def _mounts_below(folder: str) -> list[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        escaped = [line.split()[4] for line in file]
    points = [
        os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), point))
        for point in escaped
    ]
    outermost: list[str] = []
    for path in sorted(points):
        if path.startswith(f"{folder}/") and not any(path.startswith(f"{p}/") for p in outermost):
            outermost.append(path)
    return sorted(set(outermost))


def _map_user(uid: tuple[int, int], gid: tuple[int, int]) -> None:
    users, groups = (f"{inside} {outside} 1" for inside, outside in (uid, gid))
    for name, line in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(kind: bytes, where: bytes, flags: int, data: Optional[bytes]) -> None:  # noqa: UP045
    _check(_libc.mount(kind, where, kind, flags, data), f"mount {kind.decode()}")


def _check(result: int, operation: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
