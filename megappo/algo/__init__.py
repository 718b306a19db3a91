"""The maths of PPO and its relatives, as pure functions on packed batches.

Owns: token rewards, advantages, losses, KL, rollout correction, loss weights, sampling control. Must not import ray,
megatron, hydra or the loop. numpy where a stage type goes in or out, torch where a gradient or a GPU is needed.
To add an estimator or a loss: register it in `advantages` or `losses` and declare it in
`megappo.config.algorithm_declarations`; the contract tests run over the registries.
"""
