"""Packed batches: what travels between generation, scoring and training.

Owns: the stage types and their validation, selection and concatenation. Numpy only, since torch tensors are not
zero-copy in Ray's object store. No padding anywhere: a batch of B sequences is one run of N tokens with offsets.
To add a field: declare it with `per_token` or `per_sequence`; select, concat and validate follow from that.
"""
