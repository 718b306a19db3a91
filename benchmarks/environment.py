"""What a report says of where it was measured, and the pinning of a process to one core."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
NOT_PINNED = "none: several processes"


def describe_environment(packages: Sequence[str], *, pinning: str = NOT_PINNED) -> dict[str, str]:
    """Return machine, load, versions and revision in words."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load": "{:.2f} in 1 minute, {:.2f} in 5, {:.2f} in 15".format(*os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
        "revision": _revision(),
        "threads": "1",
        "pinning": pinning,
        "clock": "CPU seconds of the process and all processes below it",
    }


def pin_to_one_core() -> str:
    """Keep this process, and those that it starts from now on, on the last core it may run on, the one least likely to
    serve the system. Returns what was done, in words."""
    if not hasattr(os, "sched_setaffinity"):
        return f"none: {platform.system()} has no call for it"
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[-1]})
    return f"core {allowed[-1]} of {len(allowed)}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _revision() -> str:
    """The git revision, marked when tracked files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")
