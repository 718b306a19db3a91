"""Advantages, KL, step metrics, balancing and micro-batch plans, side by side with verl 0.9.1.

Run by `make bench-algorithms`, which installs the peer into .oracle; see benchmarks/README.md.
"""

from benchmarks.harness import require_module, require_one_thread, run_program

PEER = "Run `make bench-algorithms`, which installs verl 0.9.1 into .oracle and puts it on PYTHONPATH."


def main() -> None:
    """Measure the chosen cases."""
    require_one_thread()
    require_module("verl", PEER)
    # The cases import the peer.
    from benchmarks.algorithm_cases.advantages import make_gae, make_grpo, make_kl_gae_metrics
    from benchmarks.algorithm_cases.balancing import make_balance, make_imbalance, make_micro_batches

    makers = {
        "balance": make_balance,
        "imbalance": make_imbalance,
        "gae": make_gae,
        "grpo": make_grpo,
        "kl_gae_metrics": make_kl_gae_metrics,
        "micro_batches": make_micro_batches,
    }
    run_program("algorithms", makers, packages=["numpy", "torch", "verl"])


if __name__ == "__main__":
    main()
