"""Named plug-ins. Each package lists its own entries with explicit `REGISTRY.register(...)` lines."""

import importlib
from typing import Generic, TypeVar, cast

from megappo.errors import MegappoError

T = TypeVar("T")


class RegistryError(MegappoError):
    """A name is not registered and is not an importable `package.module:name`."""

    exit_code = 2


class Registry(Generic[T]):
    """Map of names to plug-ins of one kind.

    Example:
        LOSSES: Registry[PolicyLoss] = Registry("policy loss")
        LOSSES.register("ppo_clip", ppo_clip)
        LOSSES.get("ppo_clip"); LOSSES.get("my_package.losses:my_loss")
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add `entry` under `name`. Raises RegistryError if the name is taken."""
        if name in self._entries:
            raise RegistryError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Return the entry called `name`, or import it when `name` is `package.module:name`.

        Raises:
            RegistryError: unknown name (the known ones are listed) or the import fails (the reason is given).
        """
        if name in self._entries:
            return self._entries[name]
        if ":" not in name:
            raise RegistryError(
                f"{self.kind} {name!r} is unknown (use one of {', '.join(self.names())}, or package.module:name)"
            )
        module_name, _, attribute = name.partition(":")
        if not module_name.strip(".") or not attribute:
            raise RegistryError(f"{self.kind} {name!r} is unknown (name it package.module:name)")
        try:
            return cast(T, getattr(importlib.import_module(module_name), attribute))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise RegistryError(f"{self.kind} {name!r} cannot be imported: {error}") from error
