"""The training engine on Megatron-core: what one rank of the actor or the critic does.

Owns: `packing` (sequences to micro-batches), `log_probs` (vocabulary-parallel statistics), `optimizer` (schedule,
skipped steps), `trainer` (passes over micro-batches), `actor`, `critic`, `reference` (the frozen policy) and
`checkpoint`. Must not import ray, rollout, weight_sync or controller. To train another model: derive from
`ModelTrainer` and give `_optimize` a loss that is a sum over tokens, each with its own weight.
"""
