"""The system calls that Python 3.11 has no names for."""

import ctypes
import os
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
# Numbers above 423 are the same on all machines.
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY_NOSUID_NODEV = 1 | 2 | 4


class KernelRefusal(Exception):
    """The kernel, or the container that this runs in, does not allow what the sandbox is made of."""


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def machine() -> str:
    """Return the machine's architecture. Raises KernelRefusal where its system calls are not known here."""
    name = os.uname().machine
    if name not in _SYS_PIVOT_ROOT:
        raise KernelRefusal(f"the sandbox knows the system calls of {' and '.join(_SYS_PIVOT_ROOT)}, not of {name}")
    return name


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    _check("unshare (new user, mount, pid, network and IPC namespaces)", _LIBC.unshare(flags))


def mount(source: str, target: str, *, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount `source` at `target`."""
    code = _LIBC.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _check(f"mount {kind or 'bind'} {source} at {target}", code)


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without devices and set-user-id programs (Linux 5.12)."""
    attributes = _MountAttr(attr_set=_ATTR_RDONLY_NOSUID_NODEV)
    code = _LIBC.syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        ctypes.c_char_p(target.encode()),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(f"mount_setattr {target}", code)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root, and the old root visible at `put_old`."""
    code = _LIBC.syscall(
        _SYS_PIVOT_ROOT[machine()], ctypes.c_char_p(new_root.encode()), ctypes.c_char_p(put_old.encode())
    )
    _check("pivot_root", code)


def detach(target: str) -> None:
    """Take a mount, and all below it, away."""
    _check(f"umount {target}", _LIBC.umount2(target.encode(), MNT_DETACH))


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _check("prctl PDEATHSIG", _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))


def hide_memory() -> None:
    """Keep other processes of the same user from reading or tracing this one."""
    _check("prctl DUMPABLE", _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def filter_calls(instructions: Sequence[bytes]) -> None:
    """Give up new privileges and install a seccomp filter (BPF instructions of 8 bytes), for all programs to come."""
    _check("prctl NO_NEW_PRIVS", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    program = _FilterProgram(len(instructions), b"".join(instructions))
    _check("prctl SECCOMP", _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def _check(what: str, code: int) -> None:
    if code != 0:
        raise KernelRefusal(f"{what}: {os.strerror(ctypes.get_errno())}")
