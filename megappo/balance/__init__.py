"""Who computes what: partition of sequences over ranks, micro-batches under a token cap, the batch schedule. Torch-free, pure python and numpy."""
