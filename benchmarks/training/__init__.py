"""Parts of `benchmarks.train_mfu`: model shapes, synthetic work, and the two ways to start it."""
