"""The command line of a server: what is set, and what extra arguments may not touch."""

import json
from pathlib import Path

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.model import Dtype, ModelConfig
from megappo.config.rollout import RolloutConfig, SGLangConfig
from megappo.errors import ConfigError
from megappo.rollout.sglang_command import ServerCommand, ServerDoor, server_command
from megappo.rollout.sglang_cpu import STAND_INS

DOOR = ServerDoor(address="10.1.2.3", http=4001, rendezvous=4002)


def command(
    device: DeviceKind = DeviceKind.cpu, *, tensor: int = 1, path: str = "/models/m", stop: str = "", **sglang: object
) -> ServerCommand:
    config = RolloutConfig(tensor=tensor, sglang=SGLangConfig(**sglang))  # type: ignore[arg-type]
    config.validation.stop = [stop] if stop else []
    model = ModelConfig(path=path, dtype=Dtype.bfloat16)
    return server_command(config, model, device=device, door=DOOR, seed=7)


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


@pytest.mark.parametrize("device", [DeviceKind.cpu, DeviceKind.cuda])
def test_the_configuration_reaches_the_server(device: DeviceKind) -> None:
    argv = command(device, tensor=2, max_total_tokens=99, max_running_requests=5, mem_fraction_static=0.3).argv
    expected = {
        "--model-path": "/models/m",
        "--dtype": "bfloat16",
        "--tp-size": "2",
        "--host": "10.1.2.3",
        "--port": "4001",
        "--nccl-port": "4002",
        "--random-seed": "7",
        "--max-total-tokens": "99",
        "--max-running-requests": "5",
        "--mem-fraction-static": "0.3",
        "--weight-version": "0",
    }
    assert {option: value(argv, option) for option in expected} == expected
    assert argv[argv.index("--skip-tokenizer-init") + 1].startswith("--")


def test_a_cpu_server_has_bounded_cache_one_thread_and_the_stand_ins() -> None:
    result = command()
    assert value(result.argv, "--device") == "cpu"
    assert value(result.argv, "--attention-backend") == "torch_native"
    assert value(result.argv, "--max-total-tokens") == "8192"
    assert {"--disable-overlap-schedule", "--sleep-on-idle"} <= set(result.argv)
    assert result.env["OMP_NUM_THREADS"] == "1"
    assert result.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert result.env["PYTHONPATH"] == str(STAND_INS)
    assert (STAND_INS / "sitecustomize.py").is_file()
    assert command(tensor=3).env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2"


def test_a_cuda_server_runs_unmodified() -> None:
    result = command(DeviceKind.cuda)
    assert result.env == {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert not {"--device", "--disable-overlap-schedule", "--max-total-tokens", "--attention-backend"} & set(
        result.argv
    )


def test_all_positions_of_the_model_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    argv = command(path=str(tmp_path)).argv
    assert value(argv, "--context-length") == "106"  # SGLang keeps 6 of them
    assert "--context-length" not in command().argv  # a model that names no positions


def test_a_server_has_a_tokenizer_only_for_stop_strings() -> None:
    assert "--skip-tokenizer-init" in command().argv
    assert "--skip-tokenizer-init" not in command(stop="END").argv


def test_extra_arguments_are_appended_with_and_without_value() -> None:
    argv = command(extra_args={"kv-cache-dtype": "fp8_e5m2", "enable-metrics": ""}).argv
    assert argv[-3:] == ["--kv-cache-dtype", "fp8_e5m2", "--enable-metrics"]


@pytest.mark.parametrize("name", ["port", "max-total-tokens", "max-run", "api-key", "config", "device", "grpc-mode"])
def test_an_extra_argument_that_megappo_sets_is_refused_also_when_abbreviated(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.extra_args\.{name}=1 is set by megappo"):
        command(extra_args={name: "1"})


def test_all_bad_extra_arguments_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as failure:
        command(extra_args={"--tp-size": "1", "max_total_tokens": "1", "seed": "2", "random-seed": "2"})
    assert [violation.key.rpartition(".")[2] for violation in failure.value.violations] == [
        "--tp-size",
        "max_total_tokens",
        "random-seed",
    ]
