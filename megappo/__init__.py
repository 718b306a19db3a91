"""PPO/GRPO post-training on Megatron-Core, SGLang and Ray, from a laptop CPU to a cluster.

Reading order: ARCHITECTURE.md, `megappo/controller/step.py`, then the package you change.
"""

__version__ = "0.1.0"
