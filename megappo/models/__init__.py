"""Megatron models: layer specs, attention, value head, and building a model from a Hugging Face config. Must not import ray or train."""
