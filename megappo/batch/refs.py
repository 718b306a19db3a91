"""Opaque handles of data that stays where it was made."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Ref(Generic[T]):
    """Handle of a T held elsewhere (in Ray: an object reference; in one-process tests: the object itself).

    Only the runtime that made it can open it; the controller passes it on."""
