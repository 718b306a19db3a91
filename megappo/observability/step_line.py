"""The metrics of a step in two short lines."""

from collections.abc import Mapping

_NUMBERS = (
    ("reward", ("reward/mean",), "{:.3f}"),
    # To the reference policy where there is one, else to the policy before the update.
    ("KL", ("kl/in_reward/mean", "actor/kl/mean", "actor/approx_kl"), "{:.2g}"),
    ("entropy", ("actor/entropy/mean",), "{:.3f}"),
    ("length", ("rollout/response_tokens/mean",), "{:.1f}"),
    ("tokens/s", ("perf/tokens_per_s",), "{:,.0f}"),
    # Of the actor update; known on listed GPUs only.
    ("MFU", ("perf/mfu/actor_update",), "{:.0%}"),
)
"""Label, metrics of which the first that is there is shown, format."""

_WAIT = "wait_for_rollouts"
"""The phase of a loop that samples beside training: generation and scoring are then no parts of the step."""

_PHASES = (
    ("generate", ("generate",)),
    ("score", ("score",)),
    ("wait", (_WAIT,)),
    ("log-probs", ("log_probs",)),
    ("values", ("values",)),
    ("experience", ("experience",)),
    ("update", ("update_critic", "update_actor")),
    ("hand-over", ("weight_sync",)),
)
"""Label, and the phases of the timer that add up to it."""


def describe_step(values: Mapping[str, float]) -> str:
    """Return reward, KL, entropy, response length and throughput; what is absent is left out."""
    parts: list[str] = []
    for label, names, form in _NUMBERS:
        found = [values[name] for name in names if name in values]
        if found:
            parts.append(f"{label} {form.format(found[0])}")
    return "  ".join(parts)


def describe_split(values: Mapping[str, float]) -> str:
    """Return where the time of a step went: `1.25 s = generate 0.70 + ...`; empty for a step without timers."""
    total = values.get("timing/step_s")
    if total is None:
        return ""
    parts: list[str] = []
    beside = ("generate", "score") if f"timing/{_WAIT}_s" in values else ()
    for label, phases in _PHASES:
        if label in beside:
            continue
        seconds = [values[name] for phase in phases if (name := f"timing/{phase}_s") in values]
        if seconds:
            parts.append(f"{label} {sum(seconds):.2f}")
    return f"{total:.2f} s = {' + '.join(parts)}"
