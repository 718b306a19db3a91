"""Advantages, KL and step metrics, side by side with verl 0.9.1.

Run by `make bench NAME=algorithms`, which installs the peer into .oracle; see benchmarks/README.md.
"""

from benchmarks.harness import require_module, require_one_thread, run_program
from benchmarks.registry import VERL


def main() -> None:
    """Measure the chosen cases."""
    require_one_thread()
    require_module(VERL.module, VERL.remedy)
    # The cases import the peer.
    from benchmarks.algorithm_cases.advantages import make_gae, make_grpo, make_kl_gae_metrics

    makers = {"gae": make_gae, "grpo": make_grpo, "kl_gae_metrics": make_kl_gae_metrics}
    run_program("algorithms", makers, packages=["numpy", "torch", "verl"], pinned=True)


if __name__ == "__main__":
    main()
