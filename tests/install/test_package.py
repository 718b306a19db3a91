"""What setup.py, the requirement files and the CI script promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    """Return package -> requirement of the lines that hold for this Python."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if requirement:
            found[re.split(r"[\[<>=!~ ]", requirement)[0].lower()] = requirement
    return found


def test_setup_neither_pins_torch_nor_transformers() -> None:
    text = (ROOT / "setup.py").read_text()
    assert re.search(r'"torch>=', text) and not re.search(r'"torch==', text)
    assert re.search(r'"transformers>=', text) and not re.search(r'"transformers==', text)


def test_nothing_lists_apex_and_transformer_engine_is_a_gpu_extra() -> None:
    files = [ROOT / "setup.py", *(ROOT / "requirements").glob("*.txt")]
    required = [line for path in files for line in path.read_text().splitlines() if not line.strip().startswith("#")]
    assert not [line for line in required if re.match(r'\s*"?apex\b', line)]
    (line,) = [line for line in required if "transformer-engine" in line]
    assert '"gpu"' in line


def test_the_tested_set_is_pinned_in_the_requirement_files() -> None:
    assert pins("torch.txt") == {"torch": "torch==2.13.0"}
    assert pins("cpu.txt")["transformers"] == "transformers==5.19.0"
    assert pins("sglang-cpu-nodeps.txt")["sglang"] == "sglang==0.5.23"


def test_every_base_requirement_has_a_line_in_the_cpu_set() -> None:
    text = (ROOT / "setup.py").read_text()
    listed = re.search(r"install_requires=\[(.*?)\n    \],", text, re.DOTALL)
    assert listed is not None
    names = {
        re.split(r"[\[<>=!~ ]", requirement)[0]
        for requirement in re.findall(r"""^\s+["'](.+?)["'],""", listed[1], re.MULTILINE)
    }
    assert names - {"torch"} == set(pins("cpu.txt"))


def test_the_tested_versions_satisfy_setup(tmp_path: Path) -> None:
    packaging = pytest.importorskip("packaging.requirements")
    from importlib.metadata import version

    text = (ROOT / "setup.py").read_text()
    listed = re.search(r"install_requires=\[(.*?)\n    \],", text, re.DOTALL)
    assert listed is not None
    for quoted in re.findall(r"""^\s+(?:"(.+)"|'(.+)'),$""", listed[1], re.MULTILINE):
        requirement = packaging.Requirement(quoted[0] or quoted[1])
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(version(requirement.name), prereleases=True), str(requirement)


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    assert "\nmake test\n" in (ROOT / "README.md").read_text()
    assert "\nmake quickstart\n" in (ROOT / "README.md").read_text()


def test_the_configuration_files_travel_with_the_package(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert built.returncode == 0, built.stderr
    packaged = {path.relative_to(tmp_path / "megappo" / "configs") for path in tmp_path.rglob("*.yaml")}
    assert packaged == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    # Away from the checkout the packaged copy is found.
    run = subprocess.run(
        [sys.executable, "-P", "-m", "megappo", "config", "experiment=quickstart"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    assert "name: quickstart" in run.stdout
