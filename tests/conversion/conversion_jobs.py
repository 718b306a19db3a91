"""Jobs of the conversion tests that need Megatron; each runs on every rank."""

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest, record_files
from megappo.config.lora import LoraConfig
from megappo.config.model import ModelConfig
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.store import resolved_yaml
from megappo.conversion.layout import make_layout
from megappo.conversion.output import Output
from megappo.conversion.to_hugging_face import plan_to_hugging_face, write_hugging_face
from megappo.conversion.to_megatron import plan_to_megatron, write_megatron
from megappo.device.backend import CPU
from megappo.models.architecture import read_architecture
from megappo.models.build import Head, build_model
from megappo.models.export import export_hf_state
from megappo.models.lora import adapter_parameters
from megappo.models.sharded_state import sharded_weights
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.trainer import ModelTrainer
from tests.models.sharded_jobs import RankParts, parts_of
from tests.train.checkpoint_jobs import update_all
from tests.train.jobs import run_config

State = dict[str, torch.Tensor]
Case = tuple[str, Head, LoraConfig | None]


def parts_of_all(cases: list[Case], layout: ParallelismConfig) -> list[RankParts]:
    """What this rank has of each model (folder, head, adapters)."""
    return [parts_of(folder, layout, head, lora) for folder, head, lora in cases]


def loaded_by_megatron(folders: list[tuple[str, str]], layout: ParallelismConfig) -> list[State]:
    """What this rank exports of models into which Megatron has loaded checkpoints.

    Args:
        folders: of the checkpoint, and of a Hugging Face model with its config.json.
    """
    states: list[State] = []
    for folder, config in folders:
        architecture = read_architecture(config)
        chunks = build_model(
            architecture, model=ModelConfig(), parallelism=layout, head=Head.language_model, backend=CPU
        )
        parts = sharded_weights(chunks)
        loaded = dist_checkpointing.load(dict(parts), folder, validate_access_integrity=False)
        for key, part in parts.items():
            # Loading may have taken another tensor than the view that it was given.
            part.data.copy_(loaded[key])
        states.append(export_hf_state(chunks))
    return states


def make_trainer(role: str, folder: str, layout: ParallelismConfig, lora: LoraConfig | None = None) -> ModelTrainer:
    config = run_config(folder, layout, OptimConfig())
    config.actor.lora = config.critic.lora = lora
    return ActorTrainer(config, backend=CPU) if role == "actor" else CriticTrainer(config, backend=CPU)


def save_run(
    step: str, models: dict[str, str], layout: ParallelismConfig, lora: LoraConfig | None, seed: int
) -> dict[str, State]:
    """Save a checkpoint of trainers with other weights than they started from; returns what this rank exports.

    Args:
        step: folder that is made, as a run makes it.
        models: role -> starting model.
    """
    exported: dict[str, State] = {}
    files: list[FileRecord] = []
    torch.manual_seed(seed)  # the same on all ranks: replicated parameters stay the same
    for role, folder in models.items():
        trainer = make_trainer(role, folder, layout, lora)
        for chunk in trainer.chunks:
            trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
            for parameter in trained if lora is None else [item for item, _ in adapter_parameters(chunk)]:
                parameter.data += 0.25 if lora is None else 0.05
        update_all(trainer)
        if dist.get_rank() == 0:
            (Path(step) / role).mkdir(parents=True)
            (Path(step) / "config.yaml").write_text(resolved_yaml(run_config(folder, layout, OptimConfig())))
            (Path(step) / "loop.json").write_text("{}")
        dist.barrier()
        trainer.begin_save(f"{step}/{role}")
        shares: list[list[FileRecord]] = [[]] * dist.get_world_size()
        dist.all_gather_object(shares, trainer.checkpoints.finish_save())
        files += [FileRecord(**asdict(one) | {"path": f"{role}/{one.path}"}) for share in shares for one in share]
        exported[role] = export_hf_state(trainer.chunks)
    if dist.get_rank() == 0:
        files += record_files(Path(step), [Path(step, name) for name in ("config.yaml", "loop.json")])
        (Path(step) / MANIFEST).write_text(Manifest(step=40, created="", roles=list(models), files=files).to_json())
    dist.barrier()
    return exported


def resume_run(step: str, models: dict[str, str], layout: ParallelismConfig) -> dict[str, State]:
    """What this rank exports of trainers that have loaded a checkpoint, before and after another update."""
    exported: dict[str, State] = {}
    for role, folder in models.items():
        trainer = make_trainer(role, folder, layout)
        trainer.load(f"{step}/{role}")
        exported[role] = export_hf_state(trainer.chunks)
        exported[f"{role} after"] = update_all(trainer).weights
    return exported


def convert_together(hf: str, megatron: str, back: str) -> list[int]:
    """Convert there and back, each process its share; returns the bytes that this process reported."""
    reported = [0, 0]

    def report_to(index: int):
        def report(num_bytes: int) -> None:
            reported[index] += num_bytes

        return report

    layout = make_layout(tensor=1, pipeline=1, expert=1, expert_tensor=1)
    there = plan_to_megatron(Path(hf), layout, dtype=None)
    write_megatron(there, Output(path=Path(megatron), made_by="test", source=Path(hf)), report_to(0))
    plan = plan_to_hugging_face(Path(megatron), role=None, hf=None, dtype=None, max_file_bytes=20_000)
    write_hugging_face(plan, Output(path=Path(back), made_by="test", source=Path(megatron)), report_to(1))
    return reported
