"""Megatron models of Hugging Face architectures.

Owns: `architecture`, `rope` and `families` (torch-free: what a model folder describes); `layer_specs`, `attention`,
`norm`, `router`, `value_head`, `gpt` and `build` (the model chunks of this rank); `low_rank` and `lora` (adapters
beside frozen layers); `parameters`, `load`, `export`, `save` and `written_config` (Hugging Face weights in and out).
Imports `weights`, `device` and `config`; must not import ray or train. To add a family: add its name table to
`megappo.weights.name_map`, its traits to `megappo.config.model_families` and a `FAMILIES.register` line to `families`.
"""
