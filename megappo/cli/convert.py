"""`megappo convert`: each form is planned and checked, shown (`--dry-run`) or written, and the next step printed."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megappo.checkpoint.health import Checksums, check
from megappo.checkpoint.manifest import MANIFEST
from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from megappo.conversion.layout import make_layout
from megappo.conversion.mapping_table import hugging_face_table, megatron_table, reshard_table
from megappo.conversion.output import Output
from megappo.conversion.processes import run_job
from megappo.conversion.reshard import plan_reshard, write_reshard
from megappo.conversion.to_hugging_face import HuggingFacePlan, plan_to_hugging_face, write_hugging_face
from megappo.conversion.to_megatron import plan_to_megatron, write_megatron
from megappo.conversion.verify import Comparison, compare
from megappo.device.together import run_together
from megappo.errors import CheckpointError, ConfigError, Violation
from megappo.weights.buckets import torch_dtype

_LISTED = 10


def hf_to_megatron(parsed: argparse.Namespace) -> int:
    """Run `megappo convert hf-to-megatron`; return the exit code."""
    return run_form(_hf_to_megatron, parsed)


def megatron_to_hf(parsed: argparse.Namespace) -> int:
    """Run `megappo convert megatron-to-hf`; return the exit code."""
    return run_form(write_checkpoint_as_hf, parsed)


def reshard(parsed: argparse.Namespace) -> int:
    """Run `megappo convert reshard`; return the exit code."""
    return run_form(_reshard, parsed)


def verify(parsed: argparse.Namespace) -> int:
    """Run `megappo convert verify`; return the exit code."""
    return run_form(_verify, parsed)


def run_form(job: Callable[[argparse.Namespace], int], parsed: argparse.Namespace) -> int:
    """Run a job in the processes that the options ask for; return the exit code. Raises ConfigError."""
    # What is to be called is in the arguments, too, and needs no way into other processes.
    options = argparse.Namespace(**{name: value for name, value in vars(parsed).items() if name != "command"})
    if parsed.processes < 1:
        raise ConfigError([_violation("--processes", parsed.processes, "must be at least 1", "use 1 or more")])
    return run_job(partial(job, options), num_processes=parsed.processes)


def _violation(option: str, value: object, rule: str, remedy: str) -> Violation:
    return Violation(key=option, value=value, rule=rule, remedy=remedy)


def _hf_to_megatron(parsed: argparse.Namespace) -> int:
    plan = run_together(lambda: plan_to_megatron(parsed.hf, _layout(parsed), dtype=_dtype(parsed)))
    if parsed.dry_run:
        return _show(megatron_table(plan))
    output = _output(parsed, "hf-to-megatron", source=parsed.hf)
    run_together(lambda: output.check(plan.num_bytes))
    own = sum(planned.item.num_bytes for planned in plan.items if planned.process == dist.get_rank())
    with _timed(output, plan.num_bytes), _progress(f"{parsed.hf} -> {parsed.out}", own) as report:
        write_megatron(plan, output, report)
    if not plan.source.has_tokenizer:
        _say(f"note: {parsed.hf} has no tokenizer, so {parsed.out} has none")
    rounding = "" if plan.source.dtypes == {torch_dtype(plan.dtype.value)} else " --tolerance 0.01  # another type"
    _say(f"next: megappo convert verify --checkpoint {parsed.out} --hf {parsed.hf}{rounding}")
    return 0


def write_checkpoint_as_hf(parsed: argparse.Namespace) -> int:
    """Write a checkpoint as a Hugging Face folder, in the world of this process; return the exit code."""
    plan = run_together(
        lambda: plan_to_hugging_face(
            parsed.checkpoint,
            role=parsed.role,
            hf=parsed.hf,
            dtype=_dtype(parsed),
            max_file_bytes=parsed.max_shard_size,
            adapters_only=parsed.adapters_only,
        )
    )
    if parsed.dry_run:
        return _show(hugging_face_table(plan))
    output = _output(parsed, "megatron-to-hf", source=parsed.checkpoint)
    run_together(lambda: output.check(plan.num_bytes))
    own = sum(file.num_bytes for file in plan.files[dist.get_rank() :: dist.get_world_size()])
    with _timed(output, plan.num_bytes), _progress(f"{parsed.checkpoint} -> {parsed.out}", own) as report:
        write_hugging_face(plan, output, report)
    for line in _notes_on_hf(plan, parsed.out):
        _say(line)
    return 0


def _notes_on_hf(plan: HuggingFacePlan, out: Path) -> Iterator[str]:
    if plan.adapters_only:
        yield f"next: PeftModel.from_pretrained(model of {plan.checkpoint.side}, '{out}')"
        return
    if not plan.has_tokenizer:
        yield f"note: {plan.checkpoint.side} has no tokenizer, so {out} has none: copy one into it before serving it"
    if plan.checkpoint.model.has_value_head:
        yield f"next: reward.name=model reward.model_path={out}, or critic.path={out}"
    else:
        yield f"next: megappo train model.path={out} ..., or python -m sglang.launch_server --model-path {out}"


def _reshard(parsed: argparse.Namespace) -> int:
    plan = run_together(
        lambda: plan_reshard(
            parsed.checkpoint, _layout(parsed), weights_only=parsed.weights_only, role=parsed.role, hf=parsed.hf
        )
    )
    if parsed.dry_run:
        return _show(reshard_table(plan))
    output = _output(parsed, "reshard", source=parsed.checkpoint)
    run_together(lambda: output.check(plan.num_bytes))
    planned = [planned for model in plan.models for planned in model.items]
    own = sum(planned.item.num_bytes for planned in planned if planned.process == dist.get_rank())
    with _timed(output, plan.num_bytes), _progress(f"{parsed.checkpoint} -> {parsed.out}", own) as report:
        write_reshard(plan, output, report)
    if plan.manifest is None:
        _say(f"next: megappo convert megatron-to-hf --checkpoint {parsed.out} --out DIR")
    else:
        _say(f"next: megappo train ... resume={parsed.out}")
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    if parsed.tolerance is not None:
        if parsed.hf is None:
            remedy = "add --hf DIR, or leave it out"
            raise ConfigError([_violation("--tolerance", parsed.tolerance, "is for a comparison of weights", remedy)])
        if not 0 <= parsed.tolerance < math.inf:
            rule = "must be a number from 0 on"
            raise ConfigError([_violation("--tolerance", parsed.tolerance, rule, "use for example 0.01")])
    if parsed.hf is not None:
        return _verify_weights(parsed)
    if not parsed.checkpoint.is_dir():
        raise CheckpointError(f"{parsed.checkpoint} does not exist")
    folder = parsed.checkpoint if (parsed.checkpoint / MANIFEST).is_file() else parsed.checkpoint.resolve().parent
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{parsed.checkpoint} holds no checksums, which the checkpoint of a run does ({MANIFEST}): compare it with "
            "a Hugging Face folder (--hf DIR)"
        )
    health = check(folder, Checksums.full)
    for problem in health.problems:
        _say(problem)
    if health.is_whole and health.manifest is not None:
        size = health.manifest.num_bytes / 1e9
        _say(f"{folder}: {len(health.manifest.files)} files, {size:,.2f} GB, all as they were written")
    return 0 if health.is_whole else 1


def _verify_weights(parsed: argparse.Namespace) -> int:
    with _progress(f"{parsed.checkpoint} and {parsed.hf}", None) as report:
        result = compare(parsed.checkpoint, parsed.hf, role=parsed.role, report=report)
    for name, difference in list(result.differing.items())[:_LISTED]:
        _say(f"{name} differs by up to {difference:.3g}")
    if len(result.differing) > _LISTED:
        _say(f"... and {len(result.differing) - _LISTED} more")
    same = _is_same(result, parsed.tolerance)
    verdict = "the same weights" if same else "NOT the same weights"
    _say(
        f"{verdict}: {result.num_bitwise} of {result.num_tensors} tensors bit by bit, largest difference "
        f"{result.largest_difference:.3g}"
    )
    return 0 if same else 1


def _is_same(result: Comparison, tolerance: float | None) -> bool:
    if tolerance is None:
        return result.num_bitwise == result.num_tensors
    return result.largest_difference <= tolerance


def _layout(parsed: argparse.Namespace) -> ParallelismConfig:
    return make_layout(tensor=parsed.tp, pipeline=parsed.pp, expert=parsed.ep, expert_tensor=parsed.etp)


def _dtype(parsed: argparse.Namespace) -> Dtype | None:
    return None if parsed.dtype is None else Dtype(parsed.dtype)


def _output(parsed: argparse.Namespace, form: str, *, source: Path) -> Output:
    # Through a link, so that the folder is made on the disk that it points to, and the link stays one.
    return Output(
        path=parsed.out.resolve(), made_by=f"megappo convert {form}", source=source, overwrite=parsed.overwrite
    )


def _show(lines: Iterable[str]) -> int:
    if dist.get_rank() == 0:
        for line in lines:
            print(line)
    return 0


def _say(text: str) -> None:
    """Print a line, once for all processes."""
    if dist.get_rank() == 0:
        print(text)


@contextmanager
def _timed(output: Output, num_bytes: int) -> Iterator[None]:
    """Say at the end what was written, and how fast."""
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    speed = num_bytes / 1e6 / seconds
    _say(f"wrote {output.path}: {num_bytes / 1e9:,.3f} GB of weights in {seconds:.1f} s ({speed:,.0f} MB/s)")


@contextmanager
def _progress(text: str, num_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, of the first process's share; yields what to tell the bytes that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=dist.get_rank() != 0) as bar:
        task = bar.add_task(text, total=num_bytes)
        yield lambda done: bar.update(task, advance=done)
