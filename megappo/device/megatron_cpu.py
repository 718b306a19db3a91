"""Patches that let megatron-core 0.16.1 run on CPU tensors over gloo; the CUDA path has none.

`Backend.prepare_megatron` installs them on CPU. Each patch is one function with its upstream place and its reason; all
are safe to repeat and touch modules of `megatron.core` only. tests/device/test_megatron_cpu.py has one test per patch,
which fails when Megatron changes there.
"""

import contextlib
import functools
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# Modules that Megatron imports inside functions: they must be there before the names in them are replaced.
_LATE_MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)


def install() -> None:
    """Apply all patches."""
    # Megatron says at import, five times, that Transformer Engine and apex are missing: on a CPU there are none.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)", module="megatron")
    disable_jit_fuser()
    for name in _LATE_MODULES:
        importlib.import_module(name)
    unwrap_compiled_functions()
    redirect_cuda_calls()
    use_cpu_random_state()
    name_cpu_tensors_as_cuda()
    ignore_moves_to_cuda()
    give_split_sizes_as_numbers()
    even_out_gathers()


def disable_jit_fuser() -> None:
    """jit.py:18: `@jit_fuser` is torch.compile, which would compile C++ kernels at the first step on CPU."""
    import megatron.core.jit as jit

    jit.disable_jit_fuser()


def unwrap_compiled_functions() -> None:
    """The same for modules imported before `install`: put the plain functions back where compiled ones are."""
    for module in _megatron_modules():
        _unwrap_in(module, vars(module))
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                _unwrap_in(value, vars(value))


def _unwrap_in(owner: Any, names: Any) -> None:  # Any: a module or a class and its namespace
    for name, value in list(names.items()):
        original = getattr(value, "_torchdynamo_orig_callable", None)
        if inspect.isfunction(value) and original is not None:
            setattr(owner, name, original)


def _megatron_modules() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and isinstance(module, types.ModuleType):
            yield module


class _NoStream:
    """A stream or event of a device that has none: every method returns at once (a stream's record_event an event)."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoStream


class _CpuCudaNamespace(types.ModuleType):
    """Stands in for `torch.cuda`: the calls Megatron makes without asking whether there is a GPU answer for CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: CPU
        self.synchronize = lambda *args, **kwargs: None
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        self.Stream = _NoStream
        self.Event = _NoStream
        self.stream = lambda *args, **kwargs: contextlib.nullcontext()
        self.current_stream = self.default_stream = lambda *args, **kwargs: _NoStream()

    def __getattr__(self, name: str) -> Any:  # Any: whatever torch.cuda has under this name
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """Stands in for `torch`: tensor factories asked for device "cuda" or pinned memory make CPU tensors."""

    _FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCudaNamespace()
        for name in self._FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:  # Any: whatever torch has under this name
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:  # Any: passed on to torch
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def redirect_cuda_calls() -> None:
    """175 calls such as optimizer/clip_grads.py:90 and pipeline_parallel/schedules.py:596 name the CUDA device.

    The global name `torch` of Megatron's modules is bound to a stand-in. (A TorchFunctionMode around Megatron does
    not do: modes are off inside backward and in other threads.)
    """
    stand_in = _CpuTorch()
    for module in _megatron_modules():
        if getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]


def use_cpu_random_state() -> None:
    """tensor_parallel/random.py:40,74: the named random streams save and restore the state of a CUDA generator."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)


class _CudaTypeNames(TorchFunctionMode):
    """Inside it `tensor.type()` says torch.cuda.FloatTensor of a CPU tensor, and `tensor.cuda()` returns its tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: the protocol of torch
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **(kwargs or {}))


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # Any: the signature of the wrapped function
        with _CudaTypeNames():
            return function(*args, **kwargs)

    return call


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function of a Megatron module or class, once. The original stays at hand as `megappo_original`."""
    original = getattr(owner, name)
    if not hasattr(original, "megappo_original"):
        wrapped = functools.wraps(original)(wrap(original))
        wrapped.megappo_original = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def name_cpu_tensors_as_cuda() -> None:
    """optimizer/clip_grads.py:167, optimizer.py:671, distrib_optimizer.py:361,582 compare type() with torch.cuda.*."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    _replace(optimizer, "clip_grad_by_total_norm_fp32", _with_cuda_type_names)
    _replace(optimizer.Float16OptimizerWithFloat16Params, "__init__", _with_cuda_type_names)
    _replace(distrib_optimizer.DistributedOptimizer, "__init__", _with_cuda_type_names)


def ignore_moves_to_cuda() -> None:
    """language_module.py:244 moves the tied embedding with `.cuda()`."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    _replace(LanguageModule, "setup_embeddings_and_output_layer", _with_cuda_type_names)


def give_split_sizes_as_numbers() -> None:
    """transformer/moe/moe_utils.py:1093: split sizes become numbers on their way from the GPU only.

    Tensors that are on the CPU already stay tensors, which `all_to_all_single` does not take as split sizes.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    _replace(moe_utils, "maybe_move_tensor_to_cpu", _as_numbers)
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu


def _as_numbers(move: Callable[..., Any]) -> Callable[..., Any]:
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # Any: tensor or None
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return to_host


def even_out_gathers() -> None:
    """tensor_parallel/mappings.py:149,192: the ranks that share an expert gather different numbers of tokens.

    Gloo gathers and scatters equal parts only, so these are padded to the longest. (NCCL takes unequal ones.)
    """
    from megatron.core.tensor_parallel import mappings

    _replace(mappings, "_gather_along_first_dim", _gathering_evenly)
    _replace(mappings, "_reduce_scatter_along_first_dim", _scattering_evenly)


def _gathering_evenly(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Any: process group, list or array of numbers, flags passed on.
    def call(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *options: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *options)
        longest = int(max(output_split_sizes))
        parts = gather(_padded(input_, longest), group, None, *options).split(longest)
        return torch.cat([part[: int(size)] for part, size in zip(parts, output_split_sizes)])

    return call


def _scattering_evenly(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Any: as above.
    def call(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *options: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *options)
        sizes = [int(size) for size in input_split_sizes]
        padded = torch.cat([_padded(part, max(sizes)) for part in input_.split(sizes)])
        return scatter(padded, group, None, *options)[: sizes[group.rank()]]

    return call


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
