"""Start of the sandbox's own process: reads a job from standard input, enters the sandbox, writes what happened.

It runs with the standard library alone and knows nothing of megappo (`..host` is the other side). Two processes: the
one that was started waits outside; its child is process 1 of the sandbox, and when that ends, or is killed, the kernel
kills every other process in it.

Job: {"limits": {...}, "show": {path: what is shown there}, "runs": [{"program": text, "stdin": text}, ...]}.
Answer: {"ends": [{"end": ..., "exit_code": ..., "stdout": text, "stderr": text}, ...]}, or {"refused": reason} where
this machine does not let the sandbox be made.
"""

import json
import os
import signal
import sys

from kernel import KernelRefusal, die_with_parent
from namespaces import build_root, unshare_all
from supervise import run_programs


def main() -> int:
    """Run the job; returns the exit code."""
    # Process 1 gets from within only signals that it has handlers for: with none, no program can disturb it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    job = json.loads(sys.stdin.buffer.read())
    try:
        unshare_all()
        # Not earlier: new user rights end it.
        die_with_parent()
    except (KernelRefusal, OSError) as refusal:
        return _answer({"refused": str(refusal)})
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        die_with_parent()
        build_root(show=job["show"], work_bytes=job["limits"]["disk_bytes"])
    except (KernelRefusal, OSError) as refusal:
        return _answer({"refused": str(refusal)})
    return _answer({"ends": run_programs(job["runs"], job["limits"])})


def _answer(answer: dict[str, object]) -> int:
    sys.stdout.buffer.write(json.dumps(answer).encode())
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
