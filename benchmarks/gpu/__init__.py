"""Parts of `benchmarks.gpu_check`. Each takes the device as an argument, so that all of it runs on a CPU, too."""
