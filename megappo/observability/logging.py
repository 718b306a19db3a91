"""Log lines of each process, in a file of its own."""

import faulthandler
import io
import logging
import os
import re
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TAIL_BYTES = 64 * 1024
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def log_to_file(path: Path | str) -> None:
    """Send the log lines of this process, from level INFO on, to the end of `path`; its output stays where it is."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(target, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, logging.FileHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    logging.getLogger("megappo").setLevel(logging.INFO)


def redirect_process_output(path: Path | str) -> None:
    """Send everything this process and its children print, tracebacks of crashes included, to the end of `path`.

    File descriptors 1 and 2 are replaced, so output of C libraries and of child processes goes there, too.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(descriptor)
    # A segmentation fault or SIGABRT then leaves the Python stack in the file.
    faulthandler.enable(file=2)
    logging.basicConfig(format=_FORMAT, level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger("megappo").setLevel(logging.INFO)


def tail(path: Path | str, lines: int) -> list[str]:
    """Return the last non-empty lines of a text file, without terminal escapes; none when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    # splitlines also splits at the carriage returns of progress bars.
    kept = [_ESCAPES.sub("", line).rstrip() for line in content.splitlines()]
    return [line for line in kept if line][-lines:]
