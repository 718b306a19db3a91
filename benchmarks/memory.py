"""Peak memory of a piece of work, in a fresh process.

The figure is the highest resident size while the work runs minus the resident size just before it (VmHWM and VmRSS of
/proc/self/status, Linux only): it counts every allocator (numpy, torch, compiled code), touched pages only.
"""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

METHOD = "peak minus previous resident size of a fresh process (VmHWM - VmRSS)"


def peak_extra_bytes(make: Callable[[], Callable[[], object]], *, timeout_s: float = 600.0) -> int:
    """Return the bytes that the work made by `make` needs beyond what was held when it started.

    Args:
        make: makes the input and returns the work; a function at the top of a module, or a partial of one. What is
            done once per process (imports, compilation) it must have done, on another small input.
        timeout_s: after which the process is ended and TimeoutError is raised.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(make, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"the memory measurement did not end within {timeout_s:g} s")
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the memory measurement ended with exit code {process.exitcode}, see above") from None
    finally:
        process.kill()
        process.join()


def _measure(make: Callable[[], Callable[[], object]], sender: Connection) -> None:
    work = make()
    before = start_peak()
    result = work()
    peak = peak_above(before)
    del result
    sender.send(peak)


def start_peak() -> int:
    """Return the resident bytes of this process and forget the highest that there were."""
    gc.collect()
    # Freed memory that the allocator keeps would hide what the work takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def peak_above(before: int) -> int:
    """Return how far the resident bytes have been above those that `start_peak` gave."""
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
