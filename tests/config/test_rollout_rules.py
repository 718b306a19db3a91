"""What engines can be asked to draw, and engines that run already."""

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.rules import check_config, start_up_notes
from megappo.config.run import RunConfig


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


@pytest.mark.parametrize("section", ["sampling", "validation"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("top_p", 0.0, "top_p=0.0 must be in (0, 1] (1.0 is off)"),
        ("top_k", -2, "top_k=-2 must be positive (-1 is off)"),
        ("min_p", 1.0, "min_p=1.0 must be in [0, 1) (0.0 is off)"),
        ("min_new_tokens", 9, "min_new_tokens=9 must be between 0 and max_new_tokens=8 (0 is off)"),
        ("min_new_tokens", 3, "min_new_tokens=3 is not possible with rollout.engine=sglang"),
        ("stop_token_ids", [5, -1], "stop_token_ids=[5, -1] must be token ids"),
        ("stop", ["END", ""], "stop=['END', ''] must not hold an empty text"),
    ],
)
def test_sampling_that_cannot_be_obeyed_is_refused(
    config: RunConfig, section: str, key: str, value: object, message: str
) -> None:
    config.rollout.engine = "sglang"
    setattr(getattr(config.rollout, section), key, value)
    (found,) = messages(config)
    assert found.startswith(f"rollout.{section}.{message}")


def test_an_engine_as_fast_as_the_others_cannot_count_as_slow(config: RunConfig) -> None:
    config.rollout.recovery.slow_factor = 1.0
    assert messages(config) == [
        "rollout.recovery.slow_factor=1.0 must be above 1 (2.0 moves prompts away from engines of half the speed)"
    ]


def test_the_transformers_engine_can_hold_end_tokens_back(config: RunConfig) -> None:
    config.rollout.engine, config.rollout.sampling.min_new_tokens = "hf", 3
    assert messages(config) == []


def test_a_cut_distribution_gets_a_note(config: RunConfig) -> None:
    config.rollout.sampling.min_p = 0.1
    assert any("rollout.sampling.top_p/top_k/min_p cut" in note for note in start_up_notes(config))


def test_the_cache_of_a_server_holds_the_longest_sequence(config: RunConfig) -> None:
    config.rollout.engine, config.data.max_prompt_tokens = "sglang", 100
    config.rollout.sglang.max_total_tokens = 114  # 100 + 8 + 6
    assert messages(config) == []
    config.rollout.sglang.max_total_tokens = 113
    (found,) = messages(config)
    assert found.startswith("rollout.sglang.max_total_tokens=113 is less than data.max_prompt_tokens=100 plus 8 new")
    config.rollout.engine = "hf"
    assert messages(config) == []


def test_a_cpu_server_has_a_cache_also_where_none_is_named(config: RunConfig) -> None:
    config.rollout.engine, config.cluster.device = "sglang", DeviceKind.cpu
    config.rollout.sampling.max_new_tokens = 8193
    assert any(found.startswith("rollout.sglang.max_total_tokens=8192 is less than") for found in messages(config))


def test_servers_that_run_already_are_named_one_per_engine(config: RunConfig) -> None:
    config.rollout.engine, config.rollout.num_engines = "sglang", 2
    config.rollout.urls = ["http://10.0.0.1:30000", "https://engines.example:1"]
    config.rollout.api_key_env = "ENGINE_KEY"
    assert messages(config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"urls": ["http://h:1", "http://h:1"]}, "must name rollout.num_engines=2 different servers"),
        ({"urls": ["http://h:1", "h:2"]}, "rollout.urls=h:2 is not the address of a server (write http://HOST:PORT)"),
        ({"urls": ["http://h:1", "http://key@h:2"]}, "rollout.urls=http://key@h:2 is not the address of a server"),
        ({"urls": ["http://h:1", "http://h:2/v1"]}, "rollout.urls=http://h:2/v1 is not the address of a server"),
        ({"urls": ["http://h:1", "http://h:port"]}, "rollout.urls=http://h:port is not the address of a server"),
        ({"urls": ["http://h:1", "http://h:2"], "engine": "hf"}, "are SGLang servers, and rollout.engine=hf is none"),
        ({"api_key_env": "KEY"}, "rollout.api_key_env=KEY is the key of rollout.urls, and there are none"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(config: RunConfig, changes: dict[str, object], message: str) -> None:
    config.rollout.engine, config.rollout.num_engines = "sglang", 2
    for key, value in changes.items():
        setattr(config.rollout, key, value)
    (found,) = messages(config)
    assert message in found


@pytest.mark.parametrize(("share", "refused"), [(0.99, False), (1.0, True), (1.5, True)])
def test_servers_get_less_than_all_memory(config: RunConfig, share: float, refused: bool) -> None:
    config.rollout.engine, config.rollout.sglang.mem_fraction_static = "sglang", share
    expected = [f"rollout.sglang.mem_fraction_static={share} must be less than 1 (0.85 is much for GPUs of their own)"]
    assert messages(config) == expected * refused


def test_the_memory_of_servers_that_run_already_is_not_shared(config: RunConfig) -> None:
    config.rollout.engine, config.rollout.urls, config.weight_sync.transport = "sglang", ["http://h:1"], "ipc"
    config.rollout.num_engines = 1
    assert messages(config)[-1].startswith("weight_sync.transport=ipc shares memory with engines that megappo starts")
