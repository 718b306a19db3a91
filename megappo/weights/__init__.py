"""Weights as data: names, splits and merges, plans and buckets. Pure tensor code.

Owns: one name table per model family, used for Hugging Face -> Megatron, Megatron -> Hugging Face, the hand-over to
engines and checkpoints. Must not import megatron, ray, train or rollout.
"""
