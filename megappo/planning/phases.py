"""What is in memory in each phase of a step, on one device and on its host.

The order of the phases and who makes room for whom are those of `megappo.controller.step` and `loop`: engines on the
trainers' devices sleep while models train, and what a model's `offload` names is out whenever another part has the
device. To count something more, add an item to `_trainer_items` or `_engine_items`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megappo.config.checkpoint_rules import makes_checkpoints
from megappo.config.layout_rules import engines_share_devices, needs_critic
from megappo.config.memory import OffloadConfig
from megappo.config.reward_rules import REWARD_MODEL
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.planning.engine_memory import EngineMemory
from megappo.planning.placement import Device
from megappo.planning.training_memory import RankMemory


class Phase(StrEnum):
    """The phases of a run in which different things are in memory."""

    start = "start"
    """Models are built while engines start: nothing has made room yet, and no optimizer has stepped."""
    generate = "generate"
    log_probs = "log_probs"
    """Old and reference log-probs."""
    values = "values"
    update_critic = "update_critic"
    update_actor = "update_actor"
    save = "save"
    hand_over = "hand_over"


@dataclass(kw_only=True, slots=True, frozen=True)
class Item:
    """Something that takes memory."""

    role: str
    what: str
    bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class PhaseMemory:
    """One phase on one device."""

    phase: Phase
    items: tuple[Item, ...]
    """On the device."""
    host: tuple[Item, ...]
    """In the memory of its node, for this device."""

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def host_total(self) -> int:
        return sum(item.bytes for item in self.host)


@dataclass(kw_only=True, slots=True)
class RunMemory:
    """What is known of the parts of a run."""

    config: RunConfig
    is_cuda: bool
    trainers: Mapping[str, Sequence[RankMemory]]
    """Role -> its ranks; a reward model, too."""
    engine: EngineMemory | None
    """None: engines run elsewhere."""
    trainer_buckets: Mapping[int, int] = field(default_factory=dict[int, int])
    """Rank of the actor -> most bytes of buckets that it has in a hand-over."""
    engine_buckets: int = 0
    """The same of a rank of an engine."""

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainers use the same devices one after the other (`controller.order`)."""
        return self.config.controller is ControllerKind.synchronous and engines_share_devices(self.config)

    def phases(self) -> list[Phase]:
        """Return the phases that the run has, in order."""
        left_out: set[Phase] = set()
        if not needs_critic(self.config):
            left_out |= {Phase.values, Phase.update_critic}
        if not makes_checkpoints(self.config):
            left_out.add(Phase.save)
        return [phase for phase in Phase if phase not in left_out]

    def on_device(self, device: Device) -> list[PhaseMemory]:
        """Return what is in memory of a device and its host, phase by phase."""
        return [self._phase(phase, device) for phase in self.phases()]

    def _phase(self, phase: Phase, device: Device) -> PhaseMemory:
        items: list[Item] = []
        host: list[Item] = []
        for seat in device.seats:
            if seat.role in self.trainers:
                self._trainer_items(phase, seat.role, seat.rank, items, host)
            elif seat.role == "rollout" and self.engine is not None:
                self._engine_items(phase, self.engine, items, host)
        return PhaseMemory(
            phase=phase,
            items=tuple(item for item in items if item.bytes),
            host=tuple(item for item in host if item.bytes),
        )

    def _trainer_items(self, phase: Phase, role: str, rank: int, items: list[Item], host: list[Item]) -> None:
        memory, out = self.trainers[role][rank], self._out(phase, role)
        parts = {
            "weights": (memory.weights, out.params),
            "adapters": (memory.adapters, out.params),
            "master weights": (memory.master_weights, out.optimizer),
            "optimizer state": (0 if phase is Phase.start else memory.moments, out.optimizer),
        }
        for what, (size, is_out) in parts.items():
            (host if is_out else items).append(Item(role=role, what=what, bytes=size))
        if not out.grads:
            items.append(Item(role=role, what="gradients", bytes=memory.gradients))
        if role == "actor" and self.keeps_reference:
            host.append(Item(role=role, what="reference copy", bytes=memory.plain_weights))
            if phase is Phase.log_probs:
                items.append(Item(role=role, what="reference swap", bytes=memory.largest_parameter))
        if phase is Phase.save:
            host.append(Item(role=role, what="checkpoint copy", bytes=memory.saved))
        if phase is Phase.hand_over and role == "actor":
            items.append(Item(role=role, what="hand-over buckets", bytes=self.trainer_buckets.get(rank, 0)))

    @property
    def keeps_reference(self) -> bool:
        """Whether the actor has a frozen copy of its starting weights; with adapters it switches them off instead."""
        return self.config.algorithm.needs_reference and self.config.actor.lora is None

    def _out(self, phase: Phase, role: str) -> OffloadConfig:
        """Return what of a model is out of device memory."""
        if role == "actor":
            return self._actor_out(phase)
        if role == REWARD_MODEL:
            offload = self.config.reward_model.offload
            scores = phase in (Phase.start, Phase.generate)
            return OffloadConfig(params=offload.params and not scores)
        return self._critic_out(phase)

    def _actor_out(self, phase: Phase) -> OffloadConfig:
        offload = self.config.actor.offload
        if phase in (Phase.values, Phase.update_critic) or (self.takes_turns and phase is Phase.generate):
            return offload
        if self.takes_turns and phase in (Phase.log_probs, Phase.hand_over):
            return OffloadConfig(grads=offload.grads, optimizer=offload.optimizer)
        return OffloadConfig()

    def _critic_out(self, phase: Phase) -> OffloadConfig:
        offload = self.config.critic.offload
        if phase in (Phase.start, Phase.update_critic, Phase.save):
            return OffloadConfig()
        # A save brings all of it back, and it then stays until the next update unless engines need the room.
        stays = not self.takes_turns and Phase.save in self.phases()
        if stays and phase is not Phase.update_actor:
            return OffloadConfig()
        if phase is Phase.values:
            return OffloadConfig(grads=offload.grads, optimizer=offload.optimizer)
        return offload

    def _engine_items(self, phase: Phase, engine: EngineMemory, items: list[Item], host: list[Item]) -> None:
        sleeps = self.takes_turns and self.is_cuda and phase not in (Phase.start, Phase.generate)
        weights = Item(role="rollout", what="weights", bytes=engine.weights)
        if not sleeps or phase is Phase.hand_over:
            items.append(weights)
        elif engine.sleeps_to_host:
            host.append(weights)
        if not sleeps:
            items.append(Item(role="rollout", what="KV cache", bytes=engine.cache or 0))
        if phase is Phase.hand_over:
            items.append(Item(role="rollout", what="hand-over buckets", bytes=self.engine_buckets))
