"""What a tracker is made from."""

from dataclasses import dataclass

from megappo.config.record import TrackingConfig
from megappo.observability.run_directory import RunDirectory


@dataclass(kw_only=True, slots=True, frozen=True)
class TrackerSpec:
    """Which run a tracker keeps."""

    config: TrackingConfig
    run_name: str
    directory: RunDirectory
    """Its folder, in which a tracker may keep files of its own."""
