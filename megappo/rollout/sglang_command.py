"""The command line of one SGLang server, as a pure function of the configuration."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import RolloutConfig
from megappo.errors import ConfigError, Violation
from megappo.rollout.sglang_cpu import STAND_INS

HOST_PROGRAM = Path(__file__).with_name("sglang_host.py")
CPU_TOTAL_TOKENS = 8192
"""KV cache on a CPU where the configuration names none: SGLang would take half of the machine's memory."""
_RESERVED = ("api-key", "admin-api-key", "config")
"""Options that would lock megappo out, or change options that it sets."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerPorts:
    """Ports of one server, reserved on the loopback address."""

    http: int
    rendezvous: int
    """Where its tensor-parallel ranks meet."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerCommand:
    """How a server is started; `env` is added to the environment, PYTHONPATH in front of what is there."""

    argv: list[str]
    env: dict[str, str]


def server_command(
    config: RolloutConfig, model: ModelConfig, *, device: DeviceKind, ports: ServerPorts, seed: int
) -> ServerCommand:
    """Return the command of one server (SGLang 0.5.23).

    Args:
        device: cpu or cuda, resolved.

    Raises:
        ConfigError: an extra argument is malformed or is one that megappo sets.
    """
    options = _options(config, model, ports=ports, seed=seed)
    if device is DeviceKind.cpu:
        options |= _cpu_options(config)
    else:
        options["enable-memory-saver"] = ""  # without it sleep() frees nothing
    _refuse_bad_extra_args(config.sglang.extra_args, options)
    argv = [sys.executable, "-P", "-W", "ignore", str(HOST_PROGRAM), device.value]
    for name, value in (options | config.sglang.extra_args).items():
        argv += [f"--{name}"] if value == "" else [f"--{name}", value]
    return ServerCommand(argv=argv, env=_cpu_env(config.tensor) if device is DeviceKind.cpu else {})


def _options(config: RolloutConfig, model: ModelConfig, *, ports: ServerPorts, seed: int) -> dict[str, str]:
    """Return the options of both devices; '' is a switch."""
    options = {
        "model-path": model.path,
        "dtype": model.dtype.value,
        "tp-size": str(config.tensor),
        "host": "127.0.0.1",
        "port": str(ports.http),
        "nccl-port": str(ports.rendezvous),
        "random-seed": str(seed),
        "mem-fraction-static": str(config.sglang.mem_fraction_static),
        "max-running-requests": str(config.sglang.max_running_requests),
        "weight-version": "0",
        "skip-tokenizer-init": "",  # token ids in, token ids out
        "sampling-defaults": "openai",  # never those of the model folder
        "log-level": "warning",
    }
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
        "max-total-tokens": str(config.sglang.max_total_tokens or CPU_TOTAL_TOKENS),
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
