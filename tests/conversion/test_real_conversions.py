"""What takes minutes: peak memory, processes of its own and torchrun's, SGLang, and SmolLM2-135M for real."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from megappo.config.rollout import SamplingConfig
from megappo.models.architecture import read_architecture
from megappo.rollout.engine import GenerateRequest
from megappo.rollout.sglang_engine import SGLangEngine
from tests.conversion.conftest import assert_same, tensors_of
from tests.dist_world import free_port
from tests.models.conftest import MakeModel
from tests.models.test_real_weights import TEXTS, smollm2
from tests.rollout.conftest import engine_spec, greedy_tokens
from tests.rollout.conftest import make_model as make_small_model

__all__ = ["smollm2"]

pytestmark = pytest.mark.slow

TOOLS = Path(__file__).parents[2] / "tools"
MEASURED = """
import json, resource, sys, threading, time
import megappo.cli.convert, megappo.conversion.to_megatron
from megappo.cli.main import main

def held():
    with open("/proc/self/status") as status:
        return {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in status)
                if key in ("VmRSS", "VmHWM")}

before = held()["VmRSS"]
start = time.monotonic()
code = main(sys.argv[1:])
seconds = time.monotonic() - start
print(json.dumps({"code": code, "extra": held()["VmHWM"] - before, "seconds": seconds}))
"""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str, *options: object) -> str:
    return run(sys.executable, "-W", "ignore", TOOLS / name, *options)


def test_the_memory_of_a_conversion_is_a_few_tensors(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """0.5 GB of weights, of which the largest tensor has 66 MB."""
    config = Qwen2Config(
        vocab_size=16_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "hf")
    weights = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "hf").values())
    largest = 16_000 * 1024 * 4
    steps = {
        "hf-to-megatron": ("--hf", tmp_path / "hf", "--out", tmp_path / "megatron", "--tp", 2),
        "megatron-to-hf": ("--checkpoint", tmp_path / "megatron", "--out", tmp_path / "back"),
        "reshard": ("--checkpoint", tmp_path / "megatron", "--out", tmp_path / "other", "--weights-only"),
        "verify": ("--checkpoint", tmp_path / "megatron", "--hf", tmp_path / "back"),
    }
    for form, options in steps.items():
        printed = run(sys.executable, "-W", "ignore", "-c", MEASURED, "convert", form, *options)
        found = json.loads(printed.splitlines()[-1])
        record_property(f"{form} extra MB", round(found["extra"] / 1e6))
        record_property(f"{form} MB/s", round(weights / 1e6 / found["seconds"]))
        # A tensor as it is read, as it is written, and (where queries, keys and values are taken apart) once more.
        assert found["extra"] < 4 * largest < weights * 0.6, form


def two_nodes(*command: object) -> None:
    """Run a command under torchrun as on two machines, each with one process and an agent of its own."""
    place = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", free_port())
    torchrun = (sys.executable, "-m", "torch.distributed.run", *place, "--node-rank")
    agents = [
        subprocess.Popen([*map(str, (*torchrun, rank, *command))], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    ended = [(agent.communicate()[1], agent.returncode) for agent in agents]
    assert [code for _, code in ended] == [0, 0], ended


def test_own_processes_and_those_of_two_machines_write_the_same(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model("qwen3_moe")
    options = ("--hf", source, "--tp", 2, "--ep", 2)
    tool("convert_hf_to_megatron.py", *options, "--out", tmp_path / "own", "--processes", 2)
    two_nodes(TOOLS / "convert_hf_to_megatron.py", *options, "--out", tmp_path / "torchrun")
    for name in ("own", "torchrun"):
        size = ("--max-shard-size", "20KB", "--processes", 2)
        tool("convert_megatron_to_hf.py", "--checkpoint", tmp_path / name, "--out", tmp_path / f"{name}_back", *size)
        assert_same(tensors_of(tmp_path / f"{name}_back"), tensors_of(source))
        tool("verify_checkpoint.py", "--checkpoint", tmp_path / name, "--hf", source)


def test_one_process_that_fails_ends_all_and_says_why(make_model: MakeModel, tmp_path: Path) -> None:
    command = [TOOLS / "convert_hf_to_megatron.py", "--hf", make_model("llama"), "--out", "/proc/no", "--processes", 2]
    done = subprocess.run([sys.executable, *map(str, command)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("--out /proc/no") == 1


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(
    kind: signal.Signals, make_model: MakeModel, tmp_path: Path
) -> None:
    command = [TOOLS / "convert_hf_to_megatron.py", "--hf", make_model("llama"), "--out", tmp_path / "out"]
    tool = psutil.Popen([sys.executable, *map(str, command), "--processes", "2"], env=ENVIRONMENT)
    children: list[psutil.Process] = []
    while tool.poll() is None and len(children) < 2:
        children = [child for child in tool.children() if "spawn_main" in " ".join(child.cmdline())]
    tool.send_signal(kind)
    tool.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert len(children) == 2 and not alive


def test_sglang_serves_a_converted_folder(tmp_path: Path) -> None:
    source = make_small_model(tmp_path / "hf", seed=3)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    tool("convert_hf_to_megatron.py", "--hf", source, "--out", megatron, "--tp", 2, "--pp", 2)
    tool("convert_megatron_to_hf.py", "--checkpoint", megatron, "--out", back, "--max-shard-size", "50KB")
    prompt = [5, 6, 7]

    async def sample() -> list[int]:
        engine = SGLangEngine(engine_spec(back, tmp_path / "server.log"))
        await engine.start()
        try:
            requests = [GenerateRequest(group_id=0, prompt_tokens=prompt, num_samples=1)]
            sampling = SamplingConfig(temperature=0.0, max_new_tokens=8)
            outputs = [output async for output in engine.generate(requests, sampling, seed=0)]
        finally:
            await engine.stop()
        return list(outputs[0].responses[0].tokens)

    assert asyncio.run(sample()) == greedy_tokens(source, prompt, 8)


def test_smollm2_comes_back_and_answers_as_before(smollm2: Path, tmp_path: Path) -> None:
    tool("convert_hf_to_megatron.py", "--hf", smollm2, "--out", tmp_path / "megatron", "--tp", 3, "--pp", 2)
    tool("convert_megatron_to_hf.py", "--checkpoint", tmp_path / "megatron", "--out", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(smollm2))
    assert read_architecture(tmp_path / "back") == read_architecture(smollm2)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (smollm2, tmp_path / "back")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (smollm2, tmp_path / "back")]
    tokens = torch.tensor([tokenizers[1](TEXTS[0])["input_ids"]])
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    assert torch.equal(*logits)
    assert tokenizers[1].decode(logits[1][0, -1].argmax()).strip() == "Rome"
