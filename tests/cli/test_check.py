"""`megappo check`: its report, its exit codes, and that docs/check.md shows what it prints."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli.main import main
from megappo.config import precision_rules

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA = ["experiment=llama3_8b_8gpu", "--model-config", "llama3_8b"]
_SHOWN = re.compile(r"^```\n\$ megappo (check .*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES: dict[str, str] = dict(_SHOWN.findall((REPOSITORY / "docs" / "check.md").read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a run is here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(precision_rules, "transformer_engine_is_installed", lambda: False)


def _report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["check", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[] if "llama3" in command else [pytest.mark.slow]) for command in EXAMPLES],
)
def test_the_documented_output_is_what_is_printed(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main(shlex.split(command)) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.strip() == EXAMPLES[command].strip()


def test_four_examples_are_documented() -> None:
    experiments = {shlex.split(command)[1].partition("=")[2] for command in EXAMPLES}
    assert experiments == {"quickstart", "llama3_8b_8gpu", "qwen3_30b_a3b_32gpu", "qwen3_235b_a22b_128gpu"}


def test_the_json_holds_every_part_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, *LLAMA, "--device", "h100")
    assert report["schema"] == 1 and report["verdict"]["runs"] is True
    assert report["cluster"] == {
        "nodes": 1,
        "devices_per_node": 8,
        "device": "h100",
        "device_bytes": 79 * 1024**3,
        "devices": 8,
        "devices_used": 8,
    }
    # Embedding and head 128256 x 4096 each, 32 layers of 4096 x (4096 + 1024 + 1024 + 4096 + 3 * 14336) and two norms.
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    parameters = 2 * 128256 * 4096 + 32 * layer + 4096
    actor = report["models"]["actor"]
    assert actor["parameters"] == parameters == 8_030_261_248
    # Two tensor ranks; norms are whole on each. 16-bit weights, 32-bit gradients; state split over four data ranks.
    norms = (2 * 32 + 1) * 4096
    local = (parameters - norms) // 2 + norms
    ranks = actor["ranks"]
    assert [rank["weights"] for rank in ranks] == [2 * local] * 8  # all sizes are multiples of the padding
    assert [rank["gradients"] for rank in ranks] == [4 * local] * 8
    assert sum(rank["moments"] for rank in ranks[::2]) == 8 * local
    assert sum(rank["master_weights"] for rank in ranks[::2]) == 4 * local
    assert report["memory"]["engine"]["weights"] == 2 * parameters
    assert report["hand_over"]["bytes"] == 2 * parameters and report["hand_over"]["transport"] == "ipc"
    assert report["batch"]["optimizer_steps"] == 2
    assert report["placement"]["devices"][3]["seats"][0]["coordinates"] == {"tp": 1, "dp": 1}
    assert [line.partition("=")[0] for line in report["missing"]] == [
        "model.path",
        "data.train.path",
        "data.validation.path",
    ]


def test_devices_that_are_too_small_are_told_with_levers_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, *LLAMA, "--device", "cuda", "--device-memory", "24", code=1)
    assert report["verdict"]["memory"] == "does not fit"
    fault, cache = report["verdict"]["faults"]
    assert cache.startswith("the KV cache of an engine holds 0 tokens")  # half of 24 GiB is less than the weights
    assert fault.startswith("memory: node 0 device 0 (actor 0 (tp0 dp0), rollout 0 (engine0)) needs ")
    assert " of 24.00 GiB in phase " in fault
    assert any("actor.parallelism.tensor (now 2)" in lever for lever in report["memory"]["levers"])


def test_without_a_device_there_is_no_verdict_about_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, *LLAMA)
    assert report["verdict"]["memory"] == "unknown" and report["cluster"]["device"] == "cuda"
    assert "name the device" in report["verdict"]["next"][1]


def test_an_engine_without_room_for_a_sequence_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    # The weights of an engine are 14.96 GiB, the share 7.9.
    small = _before(LLAMA, "rollout.sglang.mem_fraction_static=0.1")
    verdict = _report(capsys, *small, "--device", "h100", code=1)["verdict"]
    assert not verdict["runs"] and verdict["memory"] == "fits"
    (fault,) = verdict["faults"]
    assert fault.startswith("the KV cache of an engine holds 0 tokens, and the longest sequence has 2560")


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    named = _before(LLAMA, 'data.train.path="data/[/x][a-c]*.jsonl"', 'data.validation.path="[red]"')
    assert main(["check", *named, "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "data.train.path=data/[/x][a-c]*.jsonl " in out and "data.validation.path=[red] " in out


def test_a_cluster_is_read_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 2\ndevices_per_node: 4\ndevice: b200\ndevice_memory_gib: 100\n")
    report = _report(capsys, *LLAMA, "--cluster", str(file))
    assert report["cluster"]["device_bytes"] == 100 * 1024**3 and report["cluster"]["nodes"] == 2


def test_all_faults_of_cluster_model_and_configuration_are_told_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = _refused(capsys, "experiment=quickstart", "actor.parallelism.tensor=3", "--nodes", "0", "--device", "tpu")
    for expected in (
        "--nodes=0 must be a whole number, 1 or more",
        "--device=tpu is not a known device",
        "actor.parallelism=3 (tensor 3 * pipeline 1 * context 1 ranks) is more than the 2 devices of pool 'main'",
        "actor.parallelism.tensor=3 must divide model.num_attention_heads=4",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*LLAMA, "--nodes", "1", "--devices-per-node", "4"], "cluster.pools=8 devices (main 8) is more than the 4"),
        ([*LLAMA, "--device", "cpu"], "cluster.device=cuda contradicts --device cpu"),
        (
            ["experiment=llama3_8b_8gpu"],
            "model.path=models/Meta-Llama-3-8B-Instruct is not a folder with a config.json",
        ),
        (["experiment=llama3_8b_8gpu", "--model-config", "x"], "--model-config=x is no preset, config.json or folder"),
        ([*LLAMA, "--cluster", "none.yaml"], "--cluster=none.yaml cannot be read"),
        ([*LLAMA, "--cluster", "none.yaml", "--nodes", "2"], "describes the cluster, and so does --nodes"),
    ],
)
def test_bad_input_is_refused_with_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in _refused(capsys, *arguments)


def test_a_file_that_is_no_mapping_or_has_unknown_keys_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    for content, message in (
        ("- 1\n", "must hold keys with values, such as nodes: 4, holds list"),
        ("nodes: [\n", "cannot be read: while parsing a flow node, line 2, column 1"),
        ("nodes: 1\ndevice: [h100]\n", "device=['h100'] is not a known device"),
        ("nodes: 1\ngpus: 8\n", "gpus=8 is not a key of a cluster"),
    ):
        file.write_text(content)
        assert message in _refused(capsys, *LLAMA, "--cluster", str(file))


def test_rules_are_those_of_the_described_device(capsys: pytest.CaptureFixture[str]) -> None:
    # On GPUs engines on the trainer's devices cannot be reached by broadcast; on a CPU they can.
    assert "weight_sync.transport=broadcast" in _refused(capsys, *_before(LLAMA, "weight_sync.transport=broadcast"))
    both = _before(LLAMA, "cluster.device=auto", "model.layer_spec=transformer_engine")
    report = _report(capsys, *both, "--device", "h100")
    assert any("needs Transformer Engine, which is not installed here" in line for line in report["missing"])
    assert "has CUDA kernels only" in _refused(capsys, *both, "--device", "cpu")


def _before(arguments: list[str], *overrides: str) -> list[str]:
    return [arguments[0], *overrides, *arguments[1:]]


def test_a_critic_that_is_not_here_is_taken_to_be_as_large_as_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("algorithm.advantage.name=gae", "critic.path=models/critic", "critic.parallelism.tensor=2")
    report = _report(capsys, *_before(LLAMA, *overrides), "--device", "b200")
    # A head of 4096 in the place of the vocabulary's.
    actor, critic = (report["models"][role]["parameters"] for role in ("actor", "critic"))
    assert critic == actor - 128256 * 4096 + 4096
    assert "values" in report["memory"]["host_bytes_per_node"]
    assert any("critic.path=models/critic is not here" in note for note in report["notes"])


def test_a_check_of_a_described_model_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\nfrom megappo.cli.main import main\n"
        f"assert main({['check', *LLAMA, '--device', 'h100', '--json']}) == 0\n"
        "loaded = {'torch', 'transformers', 'ray', 'megatron'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
