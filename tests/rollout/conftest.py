"""Tiny models, engines of every registered kind (started once) and a trainer process for hand-overs."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import PauseMode, RolloutConfig, SGLangConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.rollout import ENGINES
from megappo.rollout.engine import EngineSpec
from tests.rollout.subject import Run, Subject
from tests.rollout.trainer_process import Trainer

END_TOKENS = [1, 2]
VOCABULARY = 64


def make_model(folder: Path, seed: int, **changes: Any) -> Path:
    """Save a random Qwen2 with grouped attention, biases, two end tokens, misleading generation settings and a
    tokenizer of one character per token."""
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
    character_tokenizer(map(chr, range(65, 125))).save_pretrained(folder)  # 63 tokens
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


def engine_spec(
    folder: Path, log_path: Path, *, weight_timeout_s: float = 30.0, pause: PauseMode | None = None, **sglang: Any
) -> EngineSpec:
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
        pause=pause,
    )


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    process = Trainer()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def started_subjects() -> Iterator[dict[str, Subject]]:
    """Engines that run, by kind. Who ends one takes it out."""
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
    started_subjects: dict[str, Subject],
) -> Subject:
    """Each registered engine, started at its first test and holding the weights of the first folder."""
    kind = request.param
    if kind not in started_subjects:
        spec = engine_spec(folders[0], tmp_path_factory.mktemp("logs") / f"{kind}.log")
        spec.config.validation.stop = ["never there"]  # SGLang has a tokenizer only for stop strings
        engine = ENGINES.get(kind)(spec)
        run(engine.start())
        subject = Subject(
            engine=engine, run=run, trainer=trainer, folder=tmp_path_factory.mktemp(kind), source=folders[0]
        )
        for source in range(2):
            subject.join(f"{kind}-source-{source}")
        started_subjects[kind] = subject
    return started_subjects[kind]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_its_engine: runs after the other tests of engines; a start takes seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that end the engine they share with others behind the last of those."""
    last = [item for item in items if item.get_closest_marker("ends_its_engine")]
    for item in last:
        items.remove(item)
    sharing = [number for number, item in enumerate(items) if "subject" in getattr(item, "fixturenames", ())]
    position = sharing[-1] + 1 if sharing else len(items)
    items[position:position] = last
