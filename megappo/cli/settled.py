"""The configuration as workers get it."""

from dataclasses import replace
from pathlib import Path

from megappo.cli.rewards import settle_rewards
from megappo.cli.run_data import settle_data
from megappo.config.cluster import DeviceKind
from megappo.config.run import RunConfig
from megappo.device.backend import Backend


def settled_for_workers(config: RunConfig, backend: Backend) -> RunConfig:
    """Return the configuration with the device that `auto` stands for and with absolute paths: workers of a running
    cluster have another working directory. Raises DataError where the file of a chat template cannot be read."""
    critic = config.critic.path
    return replace(
        settle_data(settle_rewards(config)),
        cluster=replace(config.cluster, device=DeviceKind(backend.kind)),
        model=replace(config.model, path=str(Path(config.model.path).resolve())),
        critic=replace(config.critic, path=None if critic is None else str(Path(critic).resolve())),
    )
