"""The run configuration: typed dataclasses, rules between sections, and the Hydra store.

Owns: every knob of a run, in the class of the thing it configures. Must not import torch, ray, megatron or
sglang; hydra and omegaconf only in `store`. To add a knob: add a field with a unit in its docstring and a
default; if it can be wrong, add a rule in `rules.py` named for the rule.
"""
