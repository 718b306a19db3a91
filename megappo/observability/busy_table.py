"""How busy the processes of a run were: what `perf/busy_share/...` of its steps adds up to, by role."""

from collections.abc import Mapping

_PREFIX = "perf/busy_share/"
BUSY_HEADINGS = ("role", "processes", "busy", "least", "most")


class BusyTable:
    """Adds up the busy shares of steps."""

    def __init__(self) -> None:
        self._shares: dict[str, list[float]] = {}
        """By process, of the steps that were traced."""

    def add(self, numbers: Mapping[str, float]) -> None:
        """Take in the metrics of a step; most steps have no busy shares."""
        for name, value in numbers.items():
            if name.startswith(_PREFIX):
                self._shares.setdefault(name.removeprefix(_PREFIX), []).append(value)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return one row per role: the mean over its processes and steps, and its least and most busy process."""
        by_role: dict[str, dict[str, float]] = {}
        for process, shares in self._shares.items():
            by_role.setdefault(process.rpartition("_")[0], {})[process] = sum(shares) / len(shares)
        return [_row(role, means) for role, means in by_role.items()]


def _row(role: str, means: Mapping[str, float]) -> tuple[str, str, str, str, str]:
    least, most = min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
    mean = sum(means.values()) / len(means)
    return role, str(len(means)), f"{mean:.0%}", f"{means[least]:.0%} ({least})", f"{means[most]:.0%} ({most})"
