"""Parts of `benchmarks.rollout`: what is generated, how it is driven, what the times amount to."""
