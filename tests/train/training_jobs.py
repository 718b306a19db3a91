"""Jobs about optimizer, precision and recomputation; each runs on every rank."""

from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megappo.batch.fields import select
from megappo.batch.stages import Experience
from megappo.config.memory import OffloadConfig, RecomputeConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.models.parameters import unwrap
from megappo.observability.metrics import values
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from tests.train.batches import MicroBatches, make_experience, request_of, rollouts_of
from tests.train.checkpoint_jobs import load_whole, save_whole
from tests.train.jobs import complete_state, gradients_now, run_config, weights_now, whole_request

Weights = dict[str, torch.Tensor]


def own_part(deal: list[MicroBatches]) -> tuple[Experience, MicroBatches]:
    """This data rank's sequences of the whole experience, and its micro-batches."""
    micro_batches = deal[parallel_state.get_data_parallel_rank()]
    experience = make_experience()
    mine = np.flatnonzero(np.isin(experience.sequence_ids, list(chain(*micro_batches))))
    return select(experience, mine), micro_batches


def make_trainer(
    folder: str, layout: ParallelismConfig, optim: OptimConfig, dtype: Dtype = Dtype.float32
) -> ActorTrainer:
    config = run_config(folder, layout, optim)
    config.model.dtype = dtype
    return ActorTrainer(config, backend=CPU)


def train_steps(
    folder: str, layout: ParallelismConfig, optims: list[OptimConfig], deal: list[MicroBatches], epochs: int
) -> list[Weights]:
    """This stage's weights after `epochs` steps and one more, of a single micro-batch, with each of the optimizers."""
    experience, micro_batches = own_part(deal)
    request = request_of(make_experience(), micro_batches, epochs=epochs)
    last = request_of(make_experience(), [list(chain(*micro_batches))])
    results = []
    for optim in optims:
        trainer = make_trainer(folder, layout, optim)
        trainer.update(experience, request)
        trainer.update(experience, last)
        results.append(weights_now(trainer))
    return results


def weights_after_steps(
    folders: dict[str, str], layout: ParallelismConfig, optim: OptimConfig, deal: list[MicroBatches], steps: int
) -> dict[str, Weights]:
    """This stage's weights of each role after some optimizer steps on all sequences.

    Args:
        folders: starting weights of actor, critic or both.
    """
    experience, micro_batches = own_part(deal)
    request = request_of(make_experience(), micro_batches, epochs=steps)
    results = {}
    for role, folder in folders.items():
        make = ActorTrainer if role == "actor" else CriticTrainer
        trainer = make(run_config(folder, layout, optim), backend=CPU)
        trainer.update(experience, request)
        results[role] = weights_now(trainer)
    return results


def two_momentum_steps(folder: str, optim: OptimConfig) -> list[Weights]:
    """Weights before, after one step and after two, then the gradient of the second (clipping must be off)."""
    trainer = make_trainer(folder, ParallelismConfig(), optim)
    experience = make_experience()
    request = request_of(experience, [experience.sequence_ids.tolist()])
    results = [weights_now(trainer)]
    for _ in range(2):
        trainer.update(experience, request)
        results.append(weights_now(trainer))
    return [*results, gradients_now(trainer)]


def small_steps(folder: str, optim: OptimConfig, epochs: int) -> dict[str, Any]:
    """What 16-bit weights and their master weights do over steps too small for 16 bits."""
    trainer = make_trainer(folder, ParallelismConfig(), optim, Dtype.bfloat16)
    experience = make_experience()
    before, masters = weights_now(trainer), master_weights(trainer)
    trainer.update(experience, request_of(experience, [experience.sequence_ids.tolist()], epochs=epochs))
    after, moved = weights_now(trainer), master_weights(trainer)
    gradients = {buffer.grad_data.dtype for chunk in trainer.chunks for buffer in chunk.buffers}  # type: ignore[attr-defined]
    return {
        "model dtypes": {tensor.dtype for tensor in after.values()},
        "master dtypes": {tensor.dtype for tensor in moved},
        "gradient dtypes": gradients,
        "master moved": max(float((new - old).abs().max()) for new, old in zip(moved, masters)),
        "same weights": sum(torch.equal(before[name], after[name]) for name in after),
        "number of weights": len(after),
    }


def master_weights(trainer: ActorTrainer) -> list[torch.Tensor]:
    owned = [owned.tensors.get("fp32_param") for owned in trainer.optimizer.owned()]
    return [weight.detach().clone() for weight in owned if weight is not None]


def resume_with(folder: str, saved: OptimConfig, resumed: OptimConfig, checkpoint: str) -> dict[str, Any]:
    """Settings of the parameter groups after loading a checkpoint that was written with others."""
    first = make_trainer(folder, ParallelismConfig(), saved)
    first.update(make_experience(), whole_request())
    save_whole(first, checkpoint)
    second = make_trainer(folder, ParallelismConfig(), resumed)
    load_whole(second, checkpoint)
    groups = second.optimizer._megatron.param_groups
    return {
        "steps": second.optimizer.step_number,
        "decays": sorted(group["weight_decay"] for group in groups),
        "betas": {group["betas"] for group in groups},
        "eps": {group["eps"] for group in groups},
    }


def recomputed(
    folder: str, layout: ParallelismConfig, settings: list[RecomputeConfig]
) -> list[tuple[dict[str, float], Weights, dict[str, int]]]:
    """Metrics, this stage's gradient and calls of the modules of its first layer, per setting, of one step."""
    results = []
    experience = make_experience()
    ids = experience.sequence_ids.tolist()
    for recompute in settings:
        config = run_config(folder, layout, OptimConfig())
        config.model.recompute = recompute
        trainer = ActorTrainer(config, backend=CPU)
        calls = count_calls(trainer)
        metrics = trainer.update(experience, request_of(experience, [ids[:4], ids[4:]]))
        results.append((values(metrics), gradients_now(trainer), calls))
    return results


def count_calls(trainer: ActorTrainer) -> dict[str, int]:
    """Count the forward calls of some modules of the stage's first layer from now on."""
    layer: Any = unwrap(trainer.chunks[0]).decoder.layers[0]
    modules = {
        "layer": layer,
        "core_attn": layer.self_attention.core_attention,
        "mlp": layer.mlp,
        "layernorm": layer.input_layernorm,
    }
    if hasattr(layer.mlp, "router"):
        modules["router"] = layer.mlp.router
    calls = dict.fromkeys(modules, 0)

    def counter(name: str) -> Any:
        def count(*_: object) -> None:
            calls[name] += 1

        return count

    for name, module in modules.items():
        module.register_forward_pre_hook(counter(name))
    return calls


def recompute_error(folder: str, layout: ParallelismConfig, recompute: RecomputeConfig) -> str:
    """Message of the error when the model is built."""
    from megappo.errors import CapabilityError

    config = run_config(folder, layout, OptimConfig())
    config.model.recompute = recompute
    try:
        ActorTrainer(config, backend=CPU)
    except CapabilityError as error:
        return str(error)
    return "no error"


def train_with_offload(
    folder: str, layout: ParallelismConfig, optim: OptimConfig, dtype: Dtype, settings: list[OffloadConfig]
) -> list[dict[str, Any]]:
    """Two whole steps of a trainer's life per setting, in the order of the controller, and what was out of memory."""
    results = []
    experience = make_experience()
    ids = experience.sequence_ids.tolist()
    for offload in settings:
        config = run_config(folder, layout, optim)
        config.model.dtype = dtype
        config.actor.offload = offload
        trainer = ActorTrainer(config, backend=CPU)
        found: list[Any] = []
        out = []
        for _ in range(2):
            trainer.memory.release()
            out.append(emptied(trainer))
            for reference in (False, True):
                fields, metrics = trainer.compute_log_probs(rollouts_of(experience), [ids], reference=reference)
                found += [None if fields is None else fields.log_probs.values.tolist(), values(metrics)]
            trainer.memory.release()
            found.append(values(trainer.update(experience, request_of(experience, [ids[:4], ids[4:]], epochs=2))))
            trainer.memory.release(keep_params=True)
            out.append(emptied(trainer))
            found.append([bucket.tolist() for _, bucket in trainer.export_buckets(1 << 16)])
        trainer.memory.require_all()
        results.append({"found": found, "state": complete_state(trainer), "out": out})
    return results


def emptied(trainer: ActorTrainer) -> dict[str, bool | None]:
    """Which kinds of tensors have no storage; None where there are none of the kind."""
    parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    wrappers: list[Any] = list(trainer.chunks)
    kinds = {
        "params": parameters,
        "grads": [buffer.grad_data for wrapper in wrappers for buffer in wrapper.buffers],
        "moments": [
            state["exp_avg"]
            for part in trainer.optimizer._parts()
            for state in part.optimizer.state.values()
            if "exp_avg" in state
        ],
    }
    return {
        kind: all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors) if tensors else None
        for kind, tensors in kinds.items()
    }
