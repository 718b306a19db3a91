"""Parts of `benchmarks.controller`: in-process fakes behind the ports of the loop, and a loop over them."""
