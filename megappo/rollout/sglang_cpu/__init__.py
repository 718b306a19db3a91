"""What unmodified SGLang needs to run on a CPU, put in front of the server process only.

`stand_ins/` goes on PYTHONPATH of the server and its children: `sitecustomize` stands in for triton and torchvision,
`sgl_kernel` for SGLang's compiled kernels, and `cpu_launch` makes start and decoding cheaper. None of it is used on
CUDA, and none of it is imported by the rest of the package: the folder is named to a child process.
"""

from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"
"""Folder to put on PYTHONPATH of a server on a CPU."""
