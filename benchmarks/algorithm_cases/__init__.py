"""The cases of `benchmarks.algorithms`: workloads, advantages, balancing."""
