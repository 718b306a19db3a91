"""`megappo replay RECORD`: runs a phase of a recorded step again and prints what differs."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from megappo.balance.layout import RankLayout
from megappo.config.cluster import DeviceKind
from megappo.controller.record_folder import StepRecord, read_record
from megappo.data.tokenizer import decode_response, load_tokenizer
from megappo.errors import DataError, RecordError
from megappo.replay.differences import Decode, FieldDifference, NumberDifference, WorstToken
from megappo.replay.phases import PHASES, Launch, ReplayReport, ReplayRequest
from megappo.replay.processes import run_processes
from megappo.replay.settings import ReplaySettings, make_settings

DIFFERS = 1
"""Exit code when something is beyond the tolerance."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayArguments:
    """The command line."""

    record: Path
    phase: str
    layout: Sequence[str] = ()
    overrides: Sequence[str] = ()
    weights: Path | None = None
    critic_weights: Path | None = None
    start: Path | None = None
    other_weights: bool = False
    device: str = "cpu"
    tolerance: float = 1e-5
    """Log-probs in fp32 differ by less between layouts: sums in another order."""
    as_json: bool = False
    launch: Launch | None = field(default=None)
    """Does the work; None: processes of this machine."""


def replay(arguments: ReplayArguments) -> int:
    """Replay one phase; returns 0 when everything is within the tolerance, else 1.

    Raises:
        MegappoError: the record, the weights or the layout cannot be used.
    """
    if not 0 <= arguments.tolerance < math.inf:
        raise RecordError(f"--tolerance {arguments.tolerance} must be a number from 0 on (for example 1e-5)")
    record = read_record(arguments.record)
    settings = make_settings(
        record.config,
        layout=arguments.layout,
        overrides=arguments.overrides,
        device=DeviceKind(arguments.device),
    )
    if settings.data > (most := len(record.sequences)):
        raise RecordError(f"--layout data={settings.data} must be at most {most}, the sequences of {arguments.record}")
    with tempfile.TemporaryDirectory(prefix="megappo-replay-") as logs:
        request = ReplayRequest(
            folder=arguments.record,
            settings=settings,
            given=_given(arguments),
            start=arguments.start,
            checks_weights=not arguments.other_weights,
            tolerance=arguments.tolerance,
            decode=_decoder(record, arguments),
            launch=arguments.launch or partial(run_processes, log_folder=Path(logs)),
        )
        report = PHASES[arguments.phase](request)
    if arguments.as_json:
        print(json.dumps(_as_json(report, record, arguments), allow_nan=False))
    else:
        print("\n".join(_as_text(report, record, settings, arguments)))
    return 0 if report.agrees else DIFFERS


def _given(arguments: ReplayArguments) -> dict[str, Path]:
    """Return the weights named for each role; a checkpoint of the actor's holds the critic's, too."""
    actor, critic = arguments.weights, arguments.critic_weights
    given: dict[str, Path] = {}
    if actor is not None:
        given["actor"] = actor
    if critic is None and actor is not None and (actor / "critic").is_dir():
        critic = actor
    if critic is not None:
        given["critic"] = critic
    return given


def _decoder(record: StepRecord, arguments: ReplayArguments) -> Decode | None:
    """Return the tokenizer's decoder, if one of the model folders that are here has a tokenizer."""
    for folder in (arguments.weights, arguments.start, Path(record.weights["actor"].start)):
        if folder is None or not (folder / "tokenizer_config.json").is_file():
            continue
        try:
            return partial(decode_response, load_tokenizer(str(folder)))
        except DataError:
            continue
    return None


def _as_json(report: ReplayReport, record: StepRecord, arguments: ReplayArguments) -> object:
    """Return the report as JSON can hold it; numbers that are not finite are texts."""
    return _finite(
        {
            "record": str(arguments.record),
            "step": record.step,
            "phase": arguments.phase,
            "tolerance": arguments.tolerance,
            "agrees": report.agrees,
            "fields": [asdict(found) for found in report.fields],
            "numbers": [asdict(found) for found in report.numbers],
            "weights": report.weights,
            "non_finite_weights": report.non_finite_weights,
            "notes": report.notes,
        }
    )


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value


def _as_text(
    report: ReplayReport, record: StepRecord, settings: ReplaySettings, arguments: ReplayArguments
) -> list[str]:
    tokens, layouts = record.experience.num_tokens, record.layouts
    lines = [
        f"record    step {record.step}, {len(record.sequences)} sequences, {tokens:,} tokens"
        f"{'' if record.is_whole else ' (the worst of the step)'}; {'; '.join(record.reasons)}",
        f"recorded  {', '.join(f'{role}: {_layout(layout)}' for role, layout in layouts.items())}",
        f"replayed  {arguments.phase}" + (f" on {_layout(settings.layout('actor'))}" if report.weights else ""),
        *(f"weights   {role}: {where}" for role, where in report.weights.items()),
        *(f"note      {note}" for note in report.notes),
        *(
            f"weights   {name}: {count} of its numbers {'is' if count == 1 else 'are'} not finite"
            for name, count in report.non_finite_weights.items()
        ),
        "",
    ]
    if report.fields:
        lines.append(f"{'per token':<24}{'max |a-b|':>12}{'mean |a-b|':>12}{'tokens':>10}  not finite")
        for found in report.fields:
            lines += _field_lines(found)
        lines.append("")
    if report.numbers:
        width = max(len(found.name) for found in report.numbers) + 2
        lines.append(f"{'number':<{width}}{'record':>16}{'replay':>16}")
        lines += [_number_line(found, width) for found in report.numbers]
        lines.append("")
    tolerance = f"tolerance {arguments.tolerance:g}"
    return [*lines, f"all within {tolerance}" if report.agrees else f"NOT within {tolerance}"]


def _layout(layout: RankLayout) -> str:
    shown = [f"{name} {size}" for name, size in asdict(layout).items() if size > 1]
    return " x ".join(shown) if shown else "one process"


def _field_lines(found: FieldDifference) -> list[str]:
    verdict = "" if found.agrees else "  <-- differs" if found.is_judged else "  (of the engine, not judged)"
    lines = [
        f"{found.name:<24}{found.largest:>12.3g}{found.mean:>12.3g}{found.tokens:>10,}"
        f"  {found.non_finite_recorded} / {found.non_finite_replayed}{verdict}"
    ]
    if found.worst is not None and not found.agrees:
        lines.append(f"    worst: {_token(found.worst)}")
    return lines


def _token(worst: WorstToken) -> str:
    text = "" if worst.text is None else f" {worst.text!r}"
    return (
        f"sequence {worst.sequence_id} (group {worst.group_id}, row {worst.row}), position {worst.position} (response "
        f"token {worst.response_position}), token {worst.token}{text}: {worst.recorded:.7g} recorded, "
        f"{worst.replayed:.7g} replayed"
    )


def _number_line(found: NumberDifference, width: int) -> str:
    recorded = "-" if found.recorded is None else f"{found.recorded:.8g}"
    return f"{found.name:<{width}}{recorded:>16}{found.replayed:>16.8g}{'' if found.agrees else '  <-- differs'}"
