"""Stands in for triton and torchvision in a process that imports SGLang on a CPU. Python imports this file at start.

About 440 modules of sglang 0.5.23 import triton at module level to decorate GPU kernels (for example
sglang/kernels/ops/attention/decode_attention.py), and transformers' image processors import torchvision. The CPU path
calls none of it, so a module whose attributes exist and whose decorators do nothing is enough. Nothing happens until
`sglang` is imported, and a package that is installed is never replaced.
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _StandInClass:
    """Base of every CamelCase attribute: can be subclassed, subscripted and called."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls


class _StandInModule(types.ModuleType):
    """A package that has every attribute: classes for CamelCase names, submodules for others."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__
        self.__version__ = "3.0.0"
        self.__spec__ = ModuleSpec(name, _FINDER, is_package=True)

    def __getattr__(self, name: str) -> Any:  # Any: stands for whatever the real package has there
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if name in ("OutOfResources", "PTXASError"):  # named in `except` clauses
            value: object = type(name, (Exception,), {})
        elif name[:1].isupper():
            value = type(name, (_StandInClass,), {"__module__": self.__name__})
        else:
            value = sys.modules.setdefault(full_name, _StandInModule(full_name))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: `@jit` and `@jit(...)` both reach this
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return _unchanged


def _unchanged(function: Callable[..., object]) -> Callable[..., object]:
    return function


class _StandInFinder(MetaPathFinder, Loader):
    """Finds the packages that are not installed, from the first import of sglang on."""

    def __init__(self) -> None:
        self.replaced: tuple[str, ...] = ()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang" and not self.replaced:
            _cache_true_answers()
            self.replaced = tuple(name for name in ("triton", "torchvision") if importlib.util.find_spec(name) is None)
        if fullname.partition(".")[0] in self.replaced:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":  # called at import time, so these must work
            vars(module).update(
                cdiv=lambda x, y: -(-x // y),
                next_power_of_2=lambda n: 1 << max(0, (n - 1).bit_length()),
                Config=type("Config", (_StandInClass,), {}),
            )


def _cache_true_answers() -> None:
    """Let torch and transformers see, and remember, that triton and torchvision are not there."""
    from torch.utils._triton import has_triton_package
    from transformers.utils import import_utils

    has_triton_package()
    for probe in ("is_torchvision_available", "is_torchvision_v2_available", "is_triton_available"):
        if hasattr(import_utils, probe):
            getattr(import_utils, probe)()


_FINDER = _StandInFinder()
sys.meta_path.insert(0, _FINDER)
