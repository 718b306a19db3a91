"""The closed world of the sandbox: who one is in it, what files there are.

In it, a process sees no network device but a loopback that is down, no process of the outside, and of the files only
system folders and the Python installation (read-only), /proc of its own, five devices, and a working folder of limited
size in memory, empty for every run. The program runs as an ordinary user of that world.

Everything that is refused by the kernel raises KernelRefusal with the step.
"""

import os
from collections.abc import Iterable, Mapping

import kernel

WORK = "/sandbox"
"""The working folder, its name seldom in use."""
USER = 1000
"""User and group of the programs, as the sandbox numbers them."""
NOBODY = 65534
"""Outside, the user of the programs where megappo runs as root: limits on processes do not bind root."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MAX_FILES = 4096
_BASE = "/tmp"
"""Where the new root is built: any folder that exists."""
_OLD = "/old-root"


def unshare_all() -> None:
    """Enter new namespaces and map users into them. The next child is process 1 of the new world."""
    kernel.machine()
    uid, gid = os.geteuid(), os.getegid()
    own = os.getpid()
    ready_read, ready_write = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # only a process that stayed outside may map users other than itself
        os.close(ready_write)
        unshared = os.read(ready_read, 1) == b"x"
        os._exit(0 if unshared and _map_users(own, uid, gid) else 1)
    os.close(ready_read)
    try:
        kernel.unshare(
            kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
        )
        os.write(ready_write, b"x")
    finally:
        os.close(ready_write)
        _, status = os.waitpid(mapper, 0)
    if status != 0:
        raise kernel.KernelRefusal("the users of the sandbox cannot be mapped (/proc/<pid>/uid_map)")


def _map_users(process: int, uid: int, gid: int) -> bool:
    maps = {"uid_map": f"{USER} {uid} 1", "gid_map": f"{USER} {gid} 1"}
    if uid == 0:
        maps = dict.fromkeys(maps, f"0 0 1\n{USER} {NOBODY} 1")
    else:
        maps = {"setgroups": "deny"} | maps
    try:
        for name, text in maps.items():
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
    except OSError:
        return False
    return True


def build_root(*, show: Mapping[str, str], work_bytes: int) -> None:
    """Make the new file tree and leave the old one for good.

    Args:
        show: further folders that can be read inside: path inside -> path outside, free of symbolic links.
        work_bytes: size of the working folder.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _BASE, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, options="mode=755,size=1m")
    os.mkdir(_BASE + _OLD)
    kernel.pivot_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for path in _outermost([*_SYSTEM, *show]):
        _show(show.get(path, path), path)
    os.mkdir("/proc")
    kernel.mount("proc", "/proc", kind="proc", flags=kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    with open("/proc/self/smaps_rollup") as memory:  # what the limit on memory is measured by
        memory.read()
    os.mkdir("/dev")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"/dev/{name}")
    _symlink(WORK, "/dev/shm")
    _symlink(WORK, "/tmp")
    os.mkdir(WORK)
    mount_work(work_bytes)
    # A program that made a user namespace of its own would be root in it.
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    kernel.detach(_OLD)
    os.rmdir(_OLD)
    flags = kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", flags=flags | kernel.MS_BIND)


def mount_work(work_bytes: int) -> None:
    """Put an empty working folder in place."""
    options = f"mode=700,size={work_bytes},nr_inodes={_MAX_FILES},uid={USER},gid={USER}"
    kernel.mount("tmpfs", WORK, kind="tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, options=options)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not within another of them, in order."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept


def _show(source: str, path: str) -> None:
    """Show what is at `source` of the old root at `path`, read-only; nothing where there is nothing."""
    if os.path.islink(_OLD + source):
        _symlink(os.readlink(_OLD + source), path)
    elif os.path.exists(_OLD + source):
        _bind(source, path)
        kernel.make_read_only(path)


def _bind(source: str, path: str) -> None:
    if os.path.isdir(_OLD + source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o644))
    kernel.mount(_OLD + source, path, flags=kernel.MS_BIND | kernel.MS_REC)


def _symlink(target: str, path: str) -> None:
    if not os.path.lexists(path):
        os.symlink(target, path)
