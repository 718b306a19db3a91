"""Megatron models of Hugging Face architectures.

Owns: `architecture` and `families` (torch-free: what a model folder describes), `layer_specs`, `attention`, `norm`,
`value_head`, `build` (the model chunks of this rank), `load` and `export` (Hugging Face weights in and out). Imports
`weights`, `device` and `config`; must not import ray or train. To add a family: add its name table to
`megappo.weights.name_map` and a `FAMILIES.register` line to `families`.
"""
