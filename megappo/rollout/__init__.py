"""Rollout engines: the port and its implementations.

Owns: generation of token ids with log-probs and the receiving end of the weight hand-over. Must not import ray,
megatron or train; sglang only inside the server's own process. To add an engine: implement `RolloutEngine` with a
constructor that takes an `EngineSpec`, register it in `ENGINES` (here); the contract test in tests/rollout runs over
the registry.
"""

from megappo.registry import Registry
from megappo.rollout.engine import EngineFactory, EngineSpec, RolloutEngine


def _sglang(spec: EngineSpec) -> RolloutEngine:
    from megappo.rollout.sglang_engine import SGLangEngine

    return SGLangEngine(spec)


def _hf(spec: EngineSpec) -> RolloutEngine:
    from megappo.rollout.hf_engine import HFEngine

    return HFEngine(spec)


ENGINES: Registry[EngineFactory] = Registry("rollout engine")
"""Engines by name. The imports wait for the first use: they cost seconds."""
ENGINES.register("sglang", _sglang)
ENGINES.register("hf", _hf)
