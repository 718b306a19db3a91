"""The training engine on Megatron-Core.

Parallel state, packing, log-probs, actor and critic trainers, optimizer, checkpoints. Must not import ray, rollout,
weight_sync or controller.
"""
