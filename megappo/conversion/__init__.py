"""Model folders and checkpoints into each other, tensor by tensor: no process ever holds more than a few tensors.

Owns: `stored` (which Hugging Face tensors each tensor of a checkpoint is made of), `layout` (how a layout cuts them),
`torch_dist` (the files of Megatron's dist_checkpointing), `hugging_face` (model folders), `output` (a folder appears
when it is whole), `processes` (one, several or torchrun's), and the tools: `to_megatron`, `to_hugging_face`,
`adapters`, `reshard`, `verify`. Everything follows from config.json and the name table of the family: no model is
built and Megatron is not imported. Must not import ray, megatron, train or rollout.
"""
