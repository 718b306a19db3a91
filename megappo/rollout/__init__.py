"""Rollout engines: the port and its implementations.

Owns: generation of token ids with log-probs and the receiving end of the weight hand-over. Must not import ray,
megatron or train; sglang only inside the server's own process. To add an engine: implement `RolloutEngine`, register
it in `ENGINES` (here); the contract test in tests/rollout runs over the registry.
"""
