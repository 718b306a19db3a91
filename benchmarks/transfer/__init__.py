"""Parts of `benchmarks.data_plane`: the batch of a step as each side holds it, and the process that receives it."""
