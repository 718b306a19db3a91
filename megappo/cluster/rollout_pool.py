"""All rollout engines as one client: prompts are dealt over them, groups come back as they finish."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megappo.batch.refs import Ref
from megappo.cluster.placement import Slot
from megappo.cluster.rollout_host import HostSpec, RolloutHost
from megappo.cluster.runtime import Call, describe_failure, gather
from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, FinishedGroup, Shard
from megappo.rollout.engine import WeightGroup

_STARTING = "starting"
_STOP_S = 5.0
"""Longest wait for engines to end by themselves."""


class _DeviceHolder:
    """Keeps a device of a multi-device engine reserved and tells its id."""

    def device_ids(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])


class RolloutPool:
    """The engines of a run (port: RolloutClient)."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], device: DeviceKind, log_dir: Path) -> None:
        self._config = config
        self._log_paths: list[tuple[Path, Path]] = []
        self._hosts: list[Any] = []
        self._places: list[str] = []
        self._holders: list[Any] = []
        width = config.rollout.tensor
        for index in range(config.rollout.num_engines):
            mine = slots[index * width : (index + 1) * width]
            engine_log = log_dir / f"engine-{index}.log"
            spec = HostSpec(
                index=index,
                log_path=log_dir / f"rollout-{index}.log",
                engine_log_path=engine_log,
                device=device,
                visible_devices=self._reserve(mine) if device is DeviceKind.cuda else [],
            )
            self._log_paths.append((engine_log, spec.log_path))
            self._places.append(_STARTING)
            self._hosts.append(ray.remote(RolloutHost).options(**mine[0].options()).remote(spec, config))

    def _reserve(self, slots: Sequence[Slot]) -> list[str]:
        """Hold all devices of one engine; returns their ids."""
        holders: list[Any] = [ray.remote(_DeviceHolder).options(**slot.options()).remote() for slot in slots[1:]]
        probe: Any = ray.remote(_DeviceHolder).options(**slots[0].options()).remote()
        ids = [
            ids[0]
            for ids in ray.get(
                [holder.device_ids.remote() for holder in (probe, *holders)],
                timeout=self._config.cluster.start_timeout_s,
            )
        ]
        ray.kill(probe)
        self._holders += holders
        return ids

    @property
    def num_ranks(self) -> int:
        """Ranks of all engines in a weight group."""
        return self._config.rollout.tensor * len(self._hosts)

    def calls(self, method: str, *args: Any) -> list[Call]:
        """Start one method on every engine host."""
        return [self.call(index, method, *args) for index in range(len(self._hosts))]

    def call(self, index: int, method: str, *args: Any) -> Call:
        """Start one method on one engine host."""
        ref = getattr(self._hosts[index], method).remote(*args)
        return Call(ref=ref, worker=self._name(index), log_paths=self._log_paths[index])

    def _name(self, index: int) -> str:
        return f"rollout engine {index} ({self._places[index]})"

    def start(self) -> list[Call]:
        """Start all engines; returns the calls to wait for."""
        timeout_s = self._config.cluster.start_timeout_s
        self._places = gather(self.calls("identity"), phase="start", timeout_s=timeout_s)
        return self.calls("start")

    def generate(self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int) -> Iterator[FinishedGroup]:
        """Deal the draws over the engines and yield groups as they finish.

        Raises:
            EngineError: an engine died, raised, or yielded nothing for rollout.request_timeout_s.
        """
        streams: dict[Any, int] = {}
        for index, host in enumerate(self._hosts):
            mine = list(draws[index :: len(self._hosts)])
            if mine:
                stream = host.generate.options(num_returns="streaming").remote(mine, sampling, seed + index)
                streams[stream] = index
        # The engine's own deadline comes first and says more; this one catches a host that answers nothing at all.
        timeout_s = self._config.rollout.request_timeout_s + 30.0
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=timeout_s)
            if not ready:
                index = next(iter(streams.values()))
                raise self._failure(TimeoutError(f"no group finished within {timeout_s:.0f} s"), index)
            stream: Any = ready[0]
            try:
                sequences = ray.get(next(stream))
                yield FinishedGroup(sequences=sequences, samples=next(stream))
            except StopIteration:
                del streams[stream]
            except RayError as error:
                raise self._failure(error, streams[stream]) from None

    def _failure(self, error: Exception, index: int) -> Exception:
        call = Call(ref=None, worker=self._name(index), log_paths=self._log_paths[index])
        return describe_failure(error, call=call, phase="generate")

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        """Cut sampled sequences into shards; the engines forget them, and those to `forget`."""
        wanted = [list(shard) for shard in shards]
        per_engine = gather(
            self.calls("pack", wanted, list(forget)), phase="pack", timeout_s=self._config.rollout.request_timeout_s
        )
        packed = []
        for position, sequence_ids in enumerate(wanted):
            pieces: list[Ref[Any]] = [refs[position] for refs in per_engine if refs[position] is not None]
            packed.append(Shard(sequence_ids=sequence_ids, pieces=pieces))
        return packed

    def join_weight_group(self, *, name: str, address: str, port: int, backend: str) -> list[Call]:
        """Have all engines join a weight group whose rank 0 is a trainer; returns the calls to wait for."""
        width = self._config.rollout.tensor
        return [
            self.call(
                index,
                "join_weight_group",
                WeightGroup(
                    name=name,
                    address=address,
                    port=port,
                    world_size=1 + self.num_ranks,
                    rank_offset=1 + index * width,
                    backend=backend,
                ),
            )
            for index in range(len(self._hosts))
        ]

    def sleep(self) -> None:
        """Release engine memory for training."""
        gather(self.calls("sleep"), phase="sleep", timeout_s=self._config.weight_sync.timeout_s)

    def wake(self) -> None:
        """Take it back."""
        gather(self.calls("wake"), phase="wake", timeout_s=self._config.weight_sync.timeout_s)

    def stop(self) -> None:
        """End all engines; a host that does not answer is killed with its engine."""
        # A host that has not answered yet is still importing and would not hear us; it has started nothing either.
        stops = [host.stop.remote() for host, place in zip(self._hosts, self._places) if place != _STARTING]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)
        for worker in (*self._hosts, *self._holders):
            ray.kill(worker)
