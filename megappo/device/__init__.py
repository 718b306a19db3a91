"""Devices, process groups, and what Megatron-core needs on a CPU.

Owns: `backend` (the only place that tells CPU+gloo from CUDA+NCCL), `process_group` (worlds, model-parallel groups,
named groups beside them), `together` (steps that all ranks end alike), `spawned` (processes that end with the one that
started them) and `megatron_cpu` (the only patches of Megatron, installed on CPU only). Imports nothing of megappo but
`config` and `errors`. To add a back end: add a case to `resolve_backend` and to `Backend`.
"""
