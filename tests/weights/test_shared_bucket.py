"""Buckets in shared memory, opened by a process that is no child of ours."""

import base64
import pickle
import subprocess
import sys

import pytest
import torch

from megappo.errors import WorkerError
from megappo.weights.buckets import BucketMeta
from megappo.weights.shared_bucket import ask_manager, open_shared_bucket, share_bucket

BUCKET = BucketMeta(names=["a", "b"], shapes=[[2, 3], [4]], dtype="bfloat16", num_bytes=20)

READER = """
import base64, sys
from megappo.weights.shared_bucket import open_shared_bucket
tensors = open_shared_bucket(base64.b64decode(sys.stdin.read()))
print({name: (str(tensor.dtype), tensor.tolist()) for name, tensor in tensors.items()})
tensors["b"][0] = 99
"""


def test_another_process_sees_the_very_memory_by_a_payload_of_its_own() -> None:
    flat = torch.arange(10, dtype=torch.bfloat16).view(torch.uint8)
    for first in (6.0, 99.0):  # what the reader before has written
        payload = base64.b64encode(share_bucket(BUCKET, flat)).decode()
        reader = subprocess.run(
            [sys.executable, "-c", READER], input=payload, text=True, capture_output=True, check=True
        )
        expected = {
            "a": ("torch.bfloat16", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
            "b": ("torch.bfloat16", [first, 7.0, 8.0, 9.0]),
        }
        assert reader.stdout.strip() == str(expected)
    assert flat.view(torch.bfloat16)[6] == 99
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


@pytest.mark.parametrize("content", [eval, subprocess.run, torch.nn.Linear(1, 1)])
def test_a_payload_that_names_anything_else_is_refused_before_it_is_called(content: object) -> None:
    with pytest.raises(ValueError, match="a bucket of weights must not name"):
        open_shared_bucket(pickle.dumps({"flattened_tensor": content, "metadata": []}))


class Manager:
    """Answers after some requests that fail."""

    def __init__(self, failures: int, error: str) -> None:
        self._failures = failures
        self._error = error
        self.requests = 0

    def ask(self) -> str:
        self.requests += 1
        if self.requests <= self._failures:
            raise RuntimeError(self._error)
        return "answer"


LATE = "Shared memory manager connection has timed out"


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_a_manager_of_shared_memory_that_is_late_is_asked_again(failures: int) -> None:
    manager = Manager(failures, LATE)
    assert ask_manager(manager.ask) == "answer"
    assert manager.requests == failures + 1


def test_a_manager_that_never_answers_is_named() -> None:
    manager = Manager(99, LATE)
    with pytest.raises(WorkerError, match="torch_shm_manager did not answer 5 times in a row"):
        ask_manager(manager.ask)
    assert manager.requests == 5


def test_any_other_failure_to_share_memory_is_not_repeated() -> None:
    manager = Manager(99, "unable to allocate shared memory(shm): No space left on device")
    with pytest.raises(RuntimeError, match="No space left"):
        ask_manager(manager.ask)
    assert manager.requests == 1
