"""CPU+gloo or CUDA+NCCL: the only place that knows. Also the only patches of Megatron, for CPU."""
