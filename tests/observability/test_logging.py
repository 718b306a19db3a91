"""Log files of processes."""

import subprocess
import sys
from pathlib import Path

from megappo.observability.logging import tail

PRINTS = """
import os, sys
from megappo.observability.logging import get_logger, redirect_process_output
redirect_process_output(sys.argv[1])
print("from python")
os.system("echo from a child")
os.write(2, b"from a descriptor\\n")
get_logger("megappo.x").info("from the logger")
get_logger("elsewhere").info("too quiet to show")
raise RuntimeError("from the traceback")
"""

LOGS = """
import sys
from megappo.observability.logging import get_logger, log_to_file
log_to_file(sys.argv[1])
get_logger("megappo.x").info("told")
print("printed")
"""


def test_everything_a_process_prints_lands_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker.log"
    run = subprocess.run([sys.executable, "-c", PRINTS, str(path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "")
    content = path.read_text()
    for part in ("from python", "from a child", "from a descriptor", "INFO megappo.x: from the logger"):
        assert part in content
    assert "too quiet" not in content
    assert tail(path, 1) == ["RuntimeError: from the traceback"]


def test_a_second_process_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("before\n")
    subprocess.run([sys.executable, "-c", PRINTS, str(path)], capture_output=True, check=False)
    assert path.read_text().startswith("before\nfrom python\n")


def test_the_logger_of_the_driver_writes_to_a_file_and_leaves_the_output_alone(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    run = subprocess.run([sys.executable, "-c", LOGS, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout == "printed\n"
    assert path.read_text().endswith("INFO megappo.x: told\n")


def test_tail_gives_the_last_lines_without_escapes_and_blanks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\x1b[31mtwo\x1b[0m\n\n10%\r20%\rdone\nlast \xff\n\n")
    assert tail(path, 3) == ["20%", "done", "last \ufffd"]
    assert tail(path, 100)[:2] == ["one", "two"]


def test_tail_of_a_large_file_reads_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(path, 2) == ["line 99998", "line 99999"]


def test_tail_of_a_missing_file_is_nothing(tmp_path: Path) -> None:
    assert tail(tmp_path / "missing", 5) == []
