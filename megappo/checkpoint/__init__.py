"""The folder of a checkpoint: how it is written whole, told from a damaged one, kept and found. No tensors here.

Owns: `store` (begin, commit, remove: the driver of a run), `manifest` (every file with size and checksum), `health` (is
it whole, which one to go on from), `retention` and `scores` (which ones stay), `differences` (what another
configuration means), `names` and `disk`. What a model's folder holds is `megappo.train.checkpoint`'s, what the loop
writes `megappo.controller.checkpoints`'s. Must not import torch. To keep checkpoints for another reason: a line in
`retention.reasons_to_keep`; to refuse the change of a key: one in `differences`.
"""
