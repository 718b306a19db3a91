"""Compiles loops that numpy would have to run one short operation after the other, by numba.

Importing this takes about half a second, so modules of loops (`algo.compiled`, `balance.exchange`) are imported where
they are called, and nothing else imports it.
"""

from collections.abc import Callable, Set
from typing import Any

import numba  # pyright: ignore[reportMissingTypeStubs]  # it has none


def compile_loop(  # Any: numba keeps no signature
    function: Callable[..., Any], *, fastmath: Set[str] = frozenset()
) -> Callable[..., Any]:
    """Return the function compiled at its first call, without Python's lock while it runs.

    What is compiled is kept beside the function's file, where that cannot be written in the user's cache (or in
    NUMBA_CACHE_DIR), and where nothing can be written it is compiled in each process.

    Args:
        fastmath: what LLVM may do with floats beyond IEEE 754, by its names for it.
    """
    options: dict[str, Any] = {"fastmath": set(fastmath), "nogil": True}
    try:
        return numba.njit(cache=True, **options)(function)  # pyright: ignore
    except RuntimeError:
        # Raised where no directory can be written that would keep the result.
        return numba.njit(**options)(function)  # pyright: ignore
