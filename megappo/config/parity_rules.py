"""Rules of `rollout.parity`."""

from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.errors import Violation


def parity_limits_are_ordered(config: RunConfig) -> list[Violation]:
    """Limits are positive, and a step that ends the run has been worth a warning."""
    parity = config.rollout.parity
    violations: list[Violation] = []
    for name, warn, stop in (
        ("mean", parity.warn.mean, parity.stop.mean),
        ("max", parity.warn.max, parity.stop.max),
    ):
        for level, limit in (("warn", warn), ("stop", stop)):
            if limit is not None and not limit > 0:
                key = f"rollout.parity.{level}.{name}"
                remedy = "use null for no limit; no two kernels agree in every bit"
                violations.append(Violation(key=key, value=limit, rule="must be above 0 nats", remedy=remedy))
        if warn is not None and stop is not None and warn > stop:
            key = f"rollout.parity.warn.{name}"
            rule = f"must not be above rollout.parity.stop.{name}={stop}"
            violations.append(Violation(key=key, value=warn, rule=rule, remedy="lower it, or raise the other"))
    return violations


def parity_notes(config: RunConfig) -> list[str]:
    """Return a line when the monitor has next to nothing to compare."""
    if config.controller is ControllerKind.synchronous:
        return []
    return [
        f"controller={config.controller.name}: every rollout is a version old, so after the first step rollout.parity "
        "compares nothing (no actor/rollout_log_prob_diff/mean; correction/k3 holds how far the policy moved, too)"
    ]
