"""The loop as pure code over ports.

Must not import ray, torch, megatron or sglang; tests run it with fakes in one process.
"""
