"""Balancing and micro-batch plans, side by side with verl 0.9.1.

Run by `make bench NAME=balance`, which installs the peer into .oracle; see benchmarks/README.md.
"""

from benchmarks.harness import require_module, require_one_thread, run_program
from benchmarks.registry import VERL


def main() -> None:
    """Measure the chosen cases."""
    require_one_thread()
    require_module(VERL.module, VERL.remedy)
    # The cases import the peer.
    from benchmarks.algorithm_cases.balancing import make_balance, make_imbalance, make_micro_batches

    makers = {"balance": make_balance, "imbalance": make_imbalance, "micro_batches": make_micro_batches}
    run_program("balance", makers, packages=["numpy", "torch", "verl"], pinned=True)


if __name__ == "__main__":
    main()
