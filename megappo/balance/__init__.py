"""Who computes what: partition of sequences over ranks, micro-batches under a token cap, the batch schedule.

Owns the assignment of sequence positions to mini-batches, shards, ranks and micro-batches. Torch-free: python, numpy
and, for one search, numba; it sees lengths and group ids, never tokens. Everything is deterministic: the same lengths
give the same plan on every rank and machine.
"""
