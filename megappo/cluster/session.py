"""All processes of a run: started in parallel, named while they start, ended together."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import psutil
import ray

from megappo.algo.advantages import needs_values
from megappo.batch.fields import Packed
from megappo.batch.refs import Ref
from megappo.cluster.groups import ActorGroup, CriticGroup, TrainingGroup
from megappo.cluster.observed import Ask
from megappo.cluster.placement import Placement
from megappo.cluster.reward_desk import DeskClient, RewardModelService
from megappo.cluster.reward_model import RewardModelTrainingGroup
from megappo.cluster.reward_pool import RewardPool
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import Call, end_processes, gather, start_ray
from megappo.cluster.watchdog import Watchdog
from megappo.cluster.weight_sync import RayWeightSync
from megappo.config.cluster import DeviceKind
from megappo.config.reward_rules import REWARD_MODEL, asks_reward_model, model_rewards
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.errors import listed

Report = Callable[[str], None]


class Session:
    """Ray and the worker processes of one command. Use as a context manager: leaving ends every process.

    Attributes exist once the matching `start_*` returned.
    """

    actor: ActorGroup
    critic: CriticGroup | None = None
    rollout: RolloutPool
    reward: RewardPool
    weight_sync: RayWeightSync

    def __init__(
        self, config: RunConfig, *, backend: Backend, log_dir: Path, report: Report, note: Report | None = None
    ) -> None:
        """`report` is told what begins, `note` (from any thread) what happens meanwhile."""
        self._config = config
        self._backend = backend
        self._log_dir = log_dir.resolve()
        self._report = report
        self._note = note or report
        self._watchdog = Watchdog(config.watchdog, log_dir=self._log_dir, note=self._note)
        self._started: list[TrainingGroup | RolloutPool | RewardPool | RewardModelService] = []
        self._own_ray = False

    def __enter__(self) -> "Session":
        self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_training(self) -> None:
        """Start everything that `megappo train` needs: engines first, since they take longest."""
        config = self._config
        roles = self._roles()
        placement = self._reserve(roles)
        engines = self._start_engines(placement)
        rewards, desk = self._start_rewards(placement, roles)
        trainers = self._make_actor(placement).start()
        if "critic" in roles:
            slots = placement.slots("critic", config.cluster.pools[config.cluster.critic])
            self.critic = CriticGroup(config, slots=slots, log_dir=self._log_dir)
            self._started.append(self.critic)
            trainers += self.critic.start()
        self._wait_for_start([*rewards, *trainers])
        if desk is not None:
            self._report(desk.open())
        self._report(f"training workers are up ({self.actor.run('describe_layers')[0]}); waiting for the engines")
        self.rollout.finish_start(engines, timeout_s=config.rollout.start_timeout_s + 30.0)
        self._report("engines are up; joining the weight groups")
        self.weight_sync = RayWeightSync(
            config,
            actor=self.actor,
            rollout=self.rollout,
            backend=self._backend,
            run_folder=self._log_dir.parent,
        )
        if names := self.weight_sync.uncompared:
            self._report(f"weights that are handed over and not compared by checksum: {listed(names)}")
        self.rollout.restore_with(self.weight_sync.restore)

    def start_evaluation(self) -> None:
        """Start what answers and scores: engines, which keep the weights of the model folder, and rewards."""
        config = self._config
        roles = {"rollout": config.cluster.rollout} | self._reward_roles()
        placement = self._reserve(roles)
        engines = self._start_engines(placement)
        rewards, desk = self._start_rewards(placement, roles)
        self._wait_for_start(rewards)
        if desk is not None:
            self._report(desk.open())
        self.rollout.finish_start(engines, timeout_s=config.rollout.start_timeout_s + 30.0)
        self.rollout.admit(self.rollout.lives())

    def start_actor(self) -> None:
        """Start the actor alone (supervised fine-tuning)."""
        placement = self._reserve({"actor": self._config.cluster.actor})
        self._wait_for_start(self._make_actor(placement).start())

    def _wait_for_start(self, calls: Sequence[Call]) -> None:
        gather(calls, phase="start", timeout_s=self._config.cluster.start_timeout_s, key="cluster.start_timeout_s")

    def _start_engines(self, placement: Placement) -> list[Call]:
        """Begin to start the engines; returns the calls for `finish_start`."""
        config = self._config
        wait = ": about 30 s on a CPU" if config.rollout.engine == "sglang" and self._backend.kind == "cpu" else ""
        self._report(f"starting {config.rollout.num_engines} {config.rollout.engine} engine(s){wait}")
        self.rollout = RolloutPool(
            config,
            slots=placement.slots("rollout", config.rollout.num_engines * config.rollout.tensor),
            device=DeviceKind(self._backend.kind),
            log_dir=self._log_dir,
            note=self._note,
        )
        self._started.append(self.rollout)
        self._watchdog.tell("Engines", self.rollout.describe)
        return self.rollout.start()

    def _start_rewards(self, placement: Placement, roles: Mapping[str, str]) -> tuple[list[Call], DeskClient | None]:
        """Begin to start what scores; returns the calls to wait for, and the desk of the reward model."""
        calls, desk = self._start_reward_model(placement) if REWARD_MODEL in roles else ([], None)
        slots = placement.slots("reward", self._config.reward.workers) if "reward" in roles else []
        self.reward = RewardPool(self._config, slots=slots, log_dir=self._log_dir, note=self._note, desk=desk)
        self._started.append(self.reward)
        self._watchdog.tell("Rewards", self.reward.describe)
        return calls + self.reward.start(), desk

    def _start_reward_model(self, placement: Placement) -> tuple[list[Call], DeskClient]:
        """Begin to start the reward model that scores; returns the calls to wait for, and its desk."""
        cluster, parallelism = self._config.cluster, self._config.reward_model.parallelism
        self._report(f"starting the reward model: tensor {parallelism.tensor}, pipeline {parallelism.pipeline}")
        slots = placement.slots(REWARD_MODEL, cluster.pools[cluster.reward])
        service = RewardModelService(self._config, slots=slots, log_dir=self._log_dir)
        self._started.append(service)
        return service.start(), service.client

    def start_reward_model_training(self) -> RewardModelTrainingGroup:
        """Start the workers of a reward model that is trained."""
        cluster, parallelism = self._config.cluster, self._config.reward_model.parallelism
        placement = self._reserve({"reward": cluster.reward})
        self._report(f"starting the reward model: tensor {parallelism.tensor}, pipeline {parallelism.pipeline}")
        slots = placement.slots("reward", cluster.pools[cluster.reward])
        group = RewardModelTrainingGroup(self._config, slots=slots, log_dir=self._log_dir)
        self._started.append(group)
        self._wait_for_start(group.start())
        return group

    def observed(self) -> dict[str, Ask]:
        """Return how to ask each process what it does, by name: engines first, as in a step."""
        return {name: ask for part in self._started for name, ask in part.observed().items()}

    def put(self, batch: Packed) -> Ref[Packed]:
        """Put a batch made by the driver into the object store."""
        return cast(Ref[Packed], ray.put(batch))

    def _make_actor(self, placement: Placement) -> ActorGroup:
        cluster = self._config.cluster
        parallelism = self._config.actor.parallelism
        self._report(f"starting the actor: tensor {parallelism.tensor}, pipeline {parallelism.pipeline}")
        slots = placement.slots("actor", cluster.pools[cluster.actor])
        self.actor = ActorGroup(self._config, slots=slots, log_dir=self._log_dir)
        self._started.append(self.actor)
        return self.actor

    def _roles(self) -> dict[str, str]:
        """Return the roles that take devices, with their pools."""
        cluster = self._config.cluster
        roles = {"actor": cluster.actor, "rollout": cluster.rollout}
        if needs_values(self._config.algorithm):
            roles["critic"] = cluster.critic
        return roles | self._reward_roles()

    def _reward_roles(self) -> dict[str, str]:
        roles: dict[str, str] = {}
        if model_rewards(self._config):
            roles["reward"] = self._config.cluster.reward
        if asks_reward_model(self._config):
            roles[REWARD_MODEL] = self._config.cluster.reward
        return roles

    def _reserve(self, roles: dict[str, str]) -> Placement:
        """Start Ray and reserve the pools of the roles."""
        cluster = self._config.cluster
        self._report("starting Ray" if cluster.address is None else f"connecting to Ray at {cluster.address}")
        start_ray(cluster, num_cpus=sum(cluster.pools[pool] for pool in set(roles.values())))
        self._own_ray = True
        return Placement(cluster, roles=roles, gpu=self._backend.kind == "cuda")

    def close(self) -> None:
        """End every process that was started, within about ten seconds; safe to call twice."""
        children = psutil.Process().children(recursive=True)
        for part in reversed(self._started):
            part.stop()
        self._started = []
        if self._own_ray:
            ray.shutdown()
            self._own_ray = False
        end_processes(children, grace_s=2.0)
        self._watchdog.stop()
