"""`make` without installing anything: what would run, and what is said when a tool is missing."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = "runs/quickstart-sft/model/config.json"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the Makefile and the installer read, and no .venv."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=inherited | environment)


def dry_run(checkout: Path, *arguments: str) -> list[str]:
    result = run("make", "-n", *arguments, cwd=checkout)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def make_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_quickstart_installs_makes_the_starting_model_and_trains(checkout: Path) -> None:
    assert dry_run(checkout, "quickstart", "ARGS=seed=1 trainer.total_steps=20") == [
        "requirements/install.sh",
        ".venv/bin/megappo sft experiment=quickstart",
        ".venv/bin/megappo train experiment=quickstart seed=1 trainer.total_steps=20",
    ]


def test_quickstart_makes_the_starting_model_only_once(checkout: Path) -> None:
    (checkout / START).parent.mkdir(parents=True)
    (checkout / START).touch()
    assert dry_run(checkout, "quickstart")[:2] == [
        "requirements/install.sh",
        ".venv/bin/megappo train experiment=quickstart ",
    ]


def test_make_test_checks_lint_format_types_imports_and_tests(checkout: Path) -> None:
    assert dry_run(checkout, "test") == [
        "requirements/install.sh dev",
        ".venv/bin/ruff check .",
        ".venv/bin/ruff format --check .",
        ".venv/bin/basedpyright",
        ".venv/bin/lint-imports",
        '.venv/bin/pytest -m "not slow and not gpu"',
    ]


def test_every_target_is_explained(checkout: Path) -> None:
    shown = run("make", "help", cwd=checkout).stdout
    for target in ("quickstart", "install", "test", "test-slow", "lint", "format", "docs", "clean"):
        assert f"\n{target} " in f"\n{shown}"


def test_an_old_python_is_named_with_its_place_and_the_remedy(checkout: Path) -> None:
    make_tool(checkout / "bin", "oldpython", '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1')
    result = run("requirements/install.sh", cwd=checkout, PYTHON=str(checkout / "bin" / "oldpython"))
    assert result.returncode == 1
    assert result.stderr == (
        f"install: Python 3.9.2 at {checkout}/bin/oldpython is too old: 3.11 or newer is needed "
        "(name one: make PYTHON=python3.12 ...)\n"
    )
    assert not (checkout / ".venv").exists()


def test_a_missing_python_is_named(checkout: Path) -> None:
    result = run("requirements/install.sh", cwd=checkout, PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert "install: no python-that-is-not-there on PATH" in result.stderr


def test_a_missing_compiler_is_named(checkout: Path) -> None:
    tools = checkout / "bin"
    for name in ("bash", "dirname", "make", "env"):
        found = shutil.which(name)
        assert found is not None
        make_tool(tools, name, f'exec {found} "$@"')
    result = run("requirements/install.sh", cwd=checkout, PATH=str(tools), PYTHON=sys.executable)
    assert result.returncode == 1
    assert "install: no gcc on PATH" in result.stderr
    assert "build-essential" in result.stderr


def fake_environment(checkout: Path, *, failing: str = "nothing") -> Path:
    """A .venv whose python writes down what pip was asked, and fails for the step whose arguments hold `failing`."""
    calls = checkout / "calls"
    make_tool(checkout / ".venv", "unused", "")
    make_tool(
        checkout / ".venv" / "bin",
        "python",
        f'case "$*" in\n  --version) echo "Python 3.11.9" ;;\n  -c*) exit 0 ;;\n'
        f'  *{failing}*) echo "ERROR: Could not find it: No matching distribution found"; exit 7 ;;\n'
        f'  *) echo "$*" >> {calls} ;;\nesac',
    )
    return calls


def test_steps_run_in_order_and_only_once(checkout: Path) -> None:
    calls = fake_environment(checkout)
    first = run("requirements/install.sh", "dev", cwd=checkout, TORCH_INDEX_URL="file:///wheels")
    assert first.returncode == 0, first.stderr
    common = "-m pip install --disable-pip-version-check --no-input"
    assert calls.read_text().splitlines() == [
        f"{common} --index-url file:///wheels -r requirements/torch.txt",
        f"{common} -r requirements/cpu.txt",
        f"{common} -r requirements/sglang-cpu.txt",
        f"{common} --no-deps -r requirements/sglang-cpu-nodeps.txt",
        f"{common} --no-deps --editable .",
        f"{common} -r requirements/dev.txt",
    ]
    assert "install: step 1 of 6, torch ..." in first.stdout
    calls.unlink()
    second = run("requirements/install.sh", "dev", cwd=checkout)
    assert (second.returncode, second.stdout) == (0, "")
    assert not calls.exists()


def test_a_changed_requirements_file_runs_its_step_and_the_later_ones(checkout: Path) -> None:
    calls = fake_environment(checkout)
    run("requirements/install.sh", cwd=checkout)
    calls.unlink()
    with (checkout / "requirements" / "sglang-cpu.txt").open("a") as file:
        file.write("one-more\n")
    run("requirements/install.sh", cwd=checkout)
    assert [line.split()[-1] for line in calls.read_text().splitlines()] == [
        "requirements/sglang-cpu.txt",
        "requirements/sglang-cpu-nodeps.txt",
        ".",
    ]


def test_a_failing_step_is_named_with_its_reason_and_earlier_steps_are_kept(checkout: Path) -> None:
    fake_environment(checkout, failing="sglang-cpu.txt")
    result = run("requirements/install.sh", cwd=checkout)
    assert result.returncode == 1
    assert "install: step 'sglang-cpu' failed; the last lines of .venv/install.log:" in result.stderr
    assert "  | ERROR: Could not find it: No matching distribution found" in result.stderr
    assert "the package index could not be reached, or does not have this release" in result.stderr
    calls = fake_environment(checkout)
    calls.unlink()
    assert run("requirements/install.sh", cwd=checkout).returncode == 0
    assert calls.read_text().splitlines()[0].endswith("requirements/sglang-cpu.txt")
