"""The command line of one SGLang server, as a pure function of the configuration."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import SGLANG_CPU_CACHE_TOKENS, SGLANG_KEPT_TOKENS, RolloutConfig
from megappo.errors import ConfigError, Violation
from megappo.rollout.model_folder import read_positions
from megappo.rollout.sglang_cpu import STAND_INS

HOST_PROGRAM = Path(__file__).with_name("sglang_host.py")
_RESERVED = ("api-key", "admin-api-key", "config", "grpc-mode", "enable-http2", "tokenizer-worker-num", "nnodes")
"""Options that would lock megappo out, change options that it sets, or open a door without a key."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerDoor:
    """Where one server listens, on reserved ports."""

    address: str
    http: int
    rendezvous: int
    """Where its tensor-parallel ranks meet, on the loopback address."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerCommand:
    """How a server is started; `env` is added to the environment, PYTHONPATH in front of what is there."""

    argv: list[str]
    env: dict[str, str]


def server_command(
    config: RolloutConfig, model: ModelConfig, *, device: DeviceKind, door: ServerDoor, seed: int
) -> ServerCommand:
    """Return the command of one server (SGLang 0.5.23).

    Args:
        device: cpu or cuda, resolved.

    Raises:
        ConfigError: an extra argument is malformed or is one that megappo sets.
    """
    options = _options(config, model, door=door, seed=seed)
    if device is DeviceKind.cpu:
        options |= _cpu_options(config)
    else:
        options["enable-memory-saver"] = ""  # without it sleep() frees nothing
    _refuse_bad_extra_args(config.sglang.extra_args, options)
    argv = [sys.executable, "-P", "-W", "ignore", str(HOST_PROGRAM), device.value]
    for name, value in (options | config.sglang.extra_args).items():
        argv += [f"--{name}"] if value == "" else [f"--{name}", value]
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by what it keeps of it
    return ServerCommand(argv=argv, env=env | (_cpu_env(config.tensor) if device is DeviceKind.cpu else {}))


def _options(config: RolloutConfig, model: ModelConfig, *, door: ServerDoor, seed: int) -> dict[str, str]:
    """Return the options of both devices; '' is a switch."""
    options = {
        "model-path": model.path,
        "dtype": config.weight_dtype(model).value,
        "tp-size": str(config.tensor),
        "host": door.address,
        "port": str(door.http),
        "nccl-port": str(door.rendezvous),
        "random-seed": str(seed),
        "mem-fraction-static": str(config.sglang.mem_fraction_static),
        "max-running-requests": str(config.sglang.max_running_requests),
        "weight-version": "0",
        "sampling-defaults": "openai",  # never those of the model folder
        "log-level": "warning",
    }
    if not (config.sampling.stop or config.validation.stop):
        options["skip-tokenizer-init"] = ""  # token ids in, token ids out
    positions = read_positions(Path(model.path))
    if positions is not None:
        options["context-length"] = str(positions + SGLANG_KEPT_TOKENS)  # all of them can be used
    if config.sglang.attention_backend is not None:
        options["attention-backend"] = config.sglang.attention_backend
    if config.sglang.max_total_tokens is not None:
        options["max-total-tokens"] = str(config.sglang.max_total_tokens)
    return options


def _cpu_options(config: RolloutConfig) -> dict[str, str]:
    """Return the options that a CPU needs besides."""
    return {
        "device": "cpu",
        "attention-backend": config.sglang.attention_backend or "torch_native",
        "max-total-tokens": str(config.sglang.max_total_tokens or SGLANG_CPU_CACHE_TOKENS),
        "disable-overlap-schedule": "",
        "sleep-on-idle": "",  # else an idle engine keeps a core busy
        "skip-server-warmup": "",
    }


def _cpu_env(tensor: int) -> dict[str, str]:
    """Return the environment of a server on a CPU: one thread per rank, since more collapse under contention."""
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_INS)}
    if tensor > 1:  # SGLang wants one core per rank named where there are fewer NUMA nodes than ranks
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tensor))
    return env


def _refuse_bad_extra_args(extra: dict[str, str], own: dict[str, str]) -> None:
    """Raise ConfigError naming every extra argument that is malformed or would override one of ours.

    Names that SGLang does not know are refused by the server itself when it starts.
    """
    violations = []
    for name, value in extra.items():
        key = f"rollout.sglang.extra_args.{name}"
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            remedy = "write it as in `python -m sglang.launch_server --help`, without the leading dashes"
            violations.append(Violation(key=key, value=value, rule="is not a name like kv-cache-dtype", remedy=remedy))
        # The server's parser takes any unambiguous beginning of an option for the option.
        elif taken := [option for option in [*own, *_RESERVED] if option.startswith(name)]:
            remedy = "remove it; rollout, rollout.sglang and model hold the fields for it, if it may be changed"
            rule = f"is set by megappo (--{taken[0]})"
            violations.append(Violation(key=key, value=value, rule=rule, remedy=remedy))
    if violations:
        raise ConfigError(violations)
