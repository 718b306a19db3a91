"""Python's search for cyclic garbage during a run.

By default it follows every 700 objects that are made and kept, and again and again it looks through all objects there
are. A step of the loop keeps hundreds of thousands of objects to its end, and modules, configuration and prompts are
there for good: a search finds next to nothing and takes as long as half of all that the controller does in a step.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 20_000
"""Objects made and kept after which the young ones are looked through: tens of milliseconds of a large step."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """In the body, never look through what exists already, and less often through what is made. Afterwards all is as it
    was before. What reference counts free is freed at once, as ever."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
