"""What a run will need, reckoned before it starts: batch sizes, placement, memory. Pure arithmetic, torch-free.

Nothing here reads a file, asks a device or builds a model; whoever calls gives it the configuration, the sizes of the
models (`parameters.PlannedModel`) and the cluster (`cluster.ClusterDescription`). `megappo check` puts the parts
together. To count something more, such as activations, add an item to `phases`; to describe another device, a line to
`cluster.DEVICES`.
"""
