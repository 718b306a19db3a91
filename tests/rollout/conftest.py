"""Tiny models, engines of every registered kind (started once) and a trainer process for hand-overs."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig, SGLangConfig
from megappo.rollout import ENGINES
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, RolloutEngine, WeightGroup
from megappo.weight_sync.push import StageSource, push_weights
from tests.rollout.trainer_process import Trainer, free_port, plan_stages

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

END_TOKENS = [1, 2]
VOCABULARY = 64


def make_model(folder: Path, seed: int, **changes: Any) -> Path:
    """Save a random Qwen2 with grouped attention, biases, two end tokens and misleading generation settings."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": END_TOKENS[0],
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**(options | changes))).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 1, "eos_token_id": END_TOKENS}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@torch.no_grad()
def greedy_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest continuation, one forward pass over everything for each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] not in END_TOKENS:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape with different weights: that of the engines' start, and another."""
    root = tmp_path_factory.mktemp("models")
    return make_model(root / "first", seed=0), make_model(root / "second", seed=1)


@pytest.fixture(scope="session")
def models(folders: tuple[Path, Path]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The two models, loaded."""
    first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    return first, second


@pytest.fixture(scope="session")
def run() -> Iterator[Run[Any]]:
    """Run a coroutine on the one event loop that all engines live on."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


def engine_spec(folder: Path, log_path: Path, *, weight_timeout_s: float = 30.0, **sglang: Any) -> EngineSpec:
    """Return a specification for the CPU with short deadlines."""
    config = RolloutConfig(
        sglang=SGLangConfig(mem_fraction_static=0.1, **sglang), start_timeout_s=150.0, request_timeout_s=60.0
    )
    return EngineSpec(
        config=config,
        model=ModelConfig(path=str(folder)),
        device=DeviceKind.cpu,
        index=0,
        seed=0,
        log_path=log_path,
        weight_timeout_s=weight_timeout_s,
    )


@dataclasses.dataclass(kw_only=True)
class Subject:
    """One engine under test, and the hand-overs that it takes part in."""

    engine: RolloutEngine
    run: Run[Any]
    trainer: Trainer
    groups: list[str]
    version: int = 0

    def generate(
        self, requests: list[GenerateRequest], sampling: SamplingConfig, *, seed: int = 0
    ) -> list[GroupOutput]:
        """Return all groups, by group id."""

        async def collect() -> list[GroupOutput]:
            return [output async for output in self.engine.generate(requests, sampling, seed=seed)]

        return sorted(self.run(collect()), key=lambda output: output.group_id)

    def hand_over(self, folder: Path, *, stages: list[StageSource] | None = None) -> int:
        """Give the engine the weights of a folder under the next version; returns that."""
        stages = stages or plan_stages(folder, self.groups)
        self.version += 1
        self.trainer.start("send", folder=folder, stages=stages)
        try:
            self.run(push_weights([self.engine], stages, self.version, timeout_s=30.0))
        finally:
            sent = self.trainer.finish()
        assert sent == sum(bucket.num_bytes for stage in stages for bucket in stage.buckets)
        return self.version


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    process = Trainer()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def _subjects() -> Iterator[dict[str, Subject]]:
    started: dict[str, Subject] = {}
    yield started
    for subject in started.values():
        subject.run(subject.engine.stop())


@pytest.fixture(params=ENGINES.names())
def subject(
    request: pytest.FixtureRequest,
    folders: tuple[Path, Path],
    trainer: Trainer,
    run: Run[Any],
    tmp_path_factory: pytest.TempPathFactory,
    _subjects: dict[str, Subject],
) -> Subject:
    """Each registered engine, started at its first test and holding the weights of the first folder."""
    kind = request.param
    if kind not in _subjects:
        spec = engine_spec(folders[0], tmp_path_factory.mktemp("logs") / f"{kind}.log")
        engine = ENGINES.get(kind)(spec)
        run(engine.start())
        groups = [f"{kind}-stage-{stage}" for stage in range(2)]
        for group in groups:
            port = free_port()
            trainer.start("join", transport="broadcast", group=group, port=port, world_size=2)
            member = WeightGroup(
                name=group, address="127.0.0.1", port=port, world_size=2, rank_offset=1, backend="gloo"
            )
            run(engine.join_weight_group(member))
            trainer.finish()
        _subjects[kind] = Subject(engine=engine, run=run, trainer=trainer, groups=groups)
    return _subjects[kind]
