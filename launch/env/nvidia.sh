# shellcheck shell=bash
# Any NVIDIA GPU. What is set already stays as it is.

# The engine sets this to 0 for itself where nobody has, and the two ends of a weight group must agree.
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}
# A link that fails is told of; otherwise NCCL is silent.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Micro-batches of ever other lengths fragment the pool: large blocks are not split, and free ones go back early.
# expandable_segments would do more, but torch_memory_saver, by which engines give memory back, refuses it.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-garbage_collection_threshold:0.8,max_split_size_mb:512}
# Every communicator would reserve device memory for NVLink SHARP, and roles that share devices have many of them.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
