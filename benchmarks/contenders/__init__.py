"""Parts of `benchmarks.end_to_end`: the workload, the contenders (a process tree each) and what is counted of them.

`workload`, `turns` and `trl_grpo` run in the peer's environment, too: they import nothing of megappo's.
"""
