"""Rules of the section `tracking`."""

import importlib.util

from megappo.config.run import RunConfig
from megappo.errors import Violation


def trackers_can_be_made(config: RunConfig) -> list[Violation]:
    """Each tracker is named once, and its package is installed."""
    trackers = config.tracking.trackers
    violations = [
        Violation(key="tracking.trackers", value=name, rule="is named twice", remedy="name it once")
        for name in dict.fromkeys(trackers)
        if trackers.count(name) > 1
    ]
    if "tensorboard" in trackers and importlib.util.find_spec("tensorboard") is None:
        violations.append(
            Violation(
                key="tracking.trackers",
                value="tensorboard",
                rule="needs the package tensorboard, which is not installed",
                remedy="pip install tensorboard, or leave it out",
            )
        )
    return violations
