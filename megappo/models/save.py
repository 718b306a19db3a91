"""A trained model as a Hugging Face folder, written by all ranks together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megappo.device.together import run_together
from megappo.errors import CheckpointError
from megappo.models.architecture import read_config
from megappo.models.export import ExportPlan, iter_export_buckets, plan_export
from megappo.models.written_config import config_changes
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.name_map import VALUE_HEAD
from megappo.weights.safetensors_io import finish_folder, partial_folder, shard_files, start_folder, write_shard

SHARD_BYTES = 4 * 1024**3
"""Largest weight file, in bytes (a larger tensor gets its own file)."""


def save_hf_model(
    model_chunks: Sequence[MegatronModule],
    source_path: str | Path,
    output_path: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    config: Mapping[str, object] | None = None,
) -> None:
    """Write the weights as a Hugging Face folder; all ranks of the default world must call this.

    Each source of the export writes its tensors, one file per bucket, into a folder beside `output_path` that all ranks
    must be able to see; at the end rank 0 adds the config, tokenizer and other side files of `source_path`
    and renames the folder. So `output_path` is the old model or the new one, never a part.

    A value model is saved as `...ForSequenceClassification` with one label.

    Args:
        config: further keys of config.json that differ from those of the source.

    Raises:
        CheckpointError: on every rank, with the reason of the first rank that failed. `output_path` is untouched.
    """
    output, source = Path(output_path), Path(source_path)
    plan = plan_export(model_chunks, shard_bytes)
    buckets, first = _all_buckets(plan)
    files = [partial_folder(output) / file for file in shard_files(len(buckets))]
    is_first_rank = dist.get_rank() == 0

    run_together(lambda: start_folder(output) if is_first_rank else None)
    run_together(lambda: _write_buckets(model_chunks, shard_bytes, files[first:], plan))
    has_value_head = any(VALUE_HEAD in bucket.names for bucket in buckets)
    changes = config_changes(read_config(source), dtype=buckets[0].dtype, has_value_head=has_value_head)
    changes |= config or {}
    run_together(
        lambda: finish_folder(output, source=source, buckets=buckets, config_changes=changes) if is_first_rank else None
    )


def _all_buckets(plan: ExportPlan) -> tuple[list[BucketMeta], int]:
    """Return the buckets of all sources, in order, and the index of the first one that this rank sends."""
    plans: list[ExportPlan | None] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    sources = {other.source: other.buckets for other in plans if other is not None and other.sends}
    first = sum(len(sources[source]) for source in sources if source < plan.source)
    return [bucket for source in sorted(sources) for bucket in sources[source]], first


def _write_buckets(
    model_chunks: Sequence[MegatronModule], shard_bytes: int, files: Sequence[Path], plan: ExportPlan
) -> None:
    if not plan.takes_part:
        return
    failure: CheckpointError | None = None
    for index, (bucket, flat) in enumerate(iter_export_buckets(model_chunks, shard_bytes)):
        if failure is None:
            try:
                write_shard(files[index], open_bucket(bucket, flat))
            except CheckpointError as error:
                failure = error  # and go on: the ranks that feed this one wait for it
    if failure is not None:
        raise failure
