"""Recorded steps run again, on another layout and without Ray: what a bug of a large run is found with on a laptop.

Owns: `settings` (a recorded configuration on other devices), `weights` (which weights a record was made with), `plans`
(the recorded work cut for another layout), `processes` and `ranks` (the real trainers in processes of this machine),
`advantages` (the maths between the passes), `differences` and `phases` (what comes out against what was recorded).
Reads records only; `controller.record` writes them. Must not import ray, megatron or cluster.
To add a phase: a function in `phases.PHASES` that returns the differences it finds.
"""
