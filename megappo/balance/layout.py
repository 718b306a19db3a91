"""What the scheduler knows of a training layout."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class RankLayout:
    """Sizes of the mesh axes of one worker group."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    virtual_pipeline: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data
