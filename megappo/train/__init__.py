"""The training engine on Megatron-Core: parallel state, packing, log-probs, actor and critic trainers, optimizer, checkpoints. Must not import ray, rollout, weight_sync or controller."""
