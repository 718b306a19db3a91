"""The stand-ins that let SGLang run on a CPU, against brute force; the server itself is in the contract test."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

from megappo.rollout.sglang_cpu import STAND_INS

IMPORT_ALL = """
try:
    import triton
except ImportError:
    print("absent before")
import sglang
print("scaled", sglang.block(10, 4), sglang.kernel(3), sglang.Config is not None)
"""

USER_OF_TRITON = """
import torchvision.transforms.functional as functional
import triton
import triton.language as tl
from triton.runtime import OutOfResources

@triton.jit
def kernel(x, BLOCK: tl.constexpr = 1): return x + 1

@triton.autotune(configs=[triton.Config({"BLOCK": 1}, num_warps=4)], key=["n"])
@triton.jit
def tuned(x): return x

class Transform(functional.InterpolationMode): pass

Config = triton.Config
block = lambda n, size: triton.cdiv(n, size) * triton.next_power_of_2(size + 1)
assert issubclass(OutOfResources, Exception)
"""


def load(name: str) -> ModuleType:
    """Import a stand-in by its file: the folder is on the path of server processes only."""
    spec = importlib.util.spec_from_file_location(f"stand_in_{Path(name).stem}", STAND_INS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_triton_and_torchvision_appear_with_the_first_import_of_sglang_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text(USER_OF_TRITON)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{STAND_INS}{os.pathsep}{tmp_path}"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # cdiv(10, 4) = 3, next_power_of_2(5) = 8
    assert result.stdout.splitlines() == ["absent before", "scaled 24 4 True"]


def test_new_tokens_get_their_cache_slots_in_the_token_pool() -> None:
    pool = torch.full((4, 6), -1, dtype=torch.int32)
    load("sgl_kernel/__init__.py").assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), pool, torch.tensor([1, 0]), torch.tensor([4, 2]), torch.tensor([30, 31, 32, 40, 41]), 6
    )
    assert pool.tolist() == [
        [40, 41, -1, -1, -1, -1],
        [-1] * 6,
        [-1, 30, 31, 32, -1, -1],
        [-1] * 6,
    ]


def test_batched_decode_attention_equals_one_sequence_at_a_time() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 4, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    slots = torch.randint(0, 50, (3, 9))
    lengths = torch.tensor([9, 1, 5])
    slots[1, 1:] = 10_000  # beyond its end a row may hold anything
    attended = load("cpu_launch.py").attend(query, keys, values, slots, lengths, scale=0.5, grouped=True)
    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            own = slots[row, :length]
            weights = torch.softmax(0.5 * keys[own, head // 2] @ query[row, head], 0)
            expected = weights @ values[own, head // 2]
            torch.testing.assert_close(attended[row, head], expected, atol=1e-6, rtol=0)
