"""Entry point of the `megappo` command: parse, load the configuration, call the command, report errors.

Exit codes: 0 done, 1 the run failed, 2 the configuration or the arguments are wrong, 85 ended in time to go on later
(`cli.signals`), 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo import __version__
from megappo.cli.convert_options import add_convert, add_export
from megappo.cli.launch import add_launch
from megappo.cli.track import add_track
from megappo.errors import INTERRUPTED, MegappoError

if TYPE_CHECKING:
    from megappo.config.run import RunConfig
    from megappo.config.store import Rule

_OVERRIDES_HELP = "group=choice or key=value, for example experiment=quickstart trainer.total_steps=20 seed=1"
_TRAIN_HELP = (
    f"{_OVERRIDES_HELP}; resume=auto goes on from the newest checkpoint of the run, resume=PATH from that one "
    "(short for trainer.resume)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: those of the process). Returns the exit code."""
    parsed = parse(arguments)
    try:
        return int(parsed.command(parsed))
    except MegappoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has left; closing the stream keeps Python from complaining at exit.
        sys.stderr.close()
        return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; `command` of the result is the function to call. Wrong ones end the process with 2."""
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    # argparse takes a list of words from one place only, which may be the empty one before the first option.
    words: list[str] | None = getattr(parsed, "overrides", getattr(parsed, "arguments", None))
    if rest and (words is None or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if words is not None:
        words.extend(rest)
    return parsed


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `command` of its result is the function to call."""
    parser = argparse.ArgumentParser(
        prog="megappo",
        description="PPO/GRPO post-training on Megatron-Core, SGLang and Ray.",
        epilog="`megappo config experiment=quickstart` prints every key with its value.",
    )
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, function, text, overrides in (
        ("train", _train, "train with PPO/GRPO", _TRAIN_HELP),
        ("sft", _sft, "make a starting model by supervised training on prompt/answer pairs", _OVERRIDES_HELP),
        ("rm", _rm, "train a reward model on preference pairs", _OVERRIDES_HELP),
        ("config", _config, "print the resolved configuration and check its types and rules", _OVERRIDES_HELP),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("overrides", nargs="*", metavar="override", help=overrides)
        command.set_defaults(command=function)
    _add_check(commands)
    _add_evaluate(commands)
    _add_inspect(commands)
    _add_replay(commands)
    add_convert(commands)
    add_export(commands)
    add_launch(commands)
    add_track(commands)
    return parser


def _train(parsed: argparse.Namespace) -> int:
    from megappo.cli.rewards import rewards_can_be_made
    from megappo.config.rules import check_config, check_files

    def run(config: "RunConfig") -> int:
        from megappo.cli.train import train

        return train(config)

    return _restartable("train", run, parsed.overrides, rules=(check_config, check_files, rewards_can_be_made))


def _sft(parsed: argparse.Namespace) -> int:
    from megappo.config.rules import check_config, check_sft_files

    def run(config: "RunConfig") -> int:
        from megappo.cli.sft import sft

        return sft(config)

    return _restartable("sft", run, parsed.overrides, rules=(check_config, check_sft_files))


def _rm(parsed: argparse.Namespace) -> int:
    from megappo.config.rules import check_config, check_rm

    def run(config: "RunConfig") -> int:
        from megappo.cli.rm import rm

        return rm(config)

    return _restartable("rm", run, parsed.overrides, rules=(check_config, check_rm))


def _restartable(
    command: str, run: Callable[["RunConfig"], int], overrides: Sequence[str], *, rules: Sequence["Rule"]
) -> int:
    """Run a command that trains: here, or in processes of its own that are started again."""
    from megappo.cli.restart import run_with_restarts
    from megappo.config.restart_rules import checkpoints_of
    from megappo.config.store import load_run_config

    config = load_run_config(overrides, rules=(*rules, checkpoints_of(command)))
    code = run_with_restarts(config, command, overrides)
    return run(config) if code is None else code


def _config(parsed: argparse.Namespace) -> int:
    from megappo.cli.config import print_config

    return print_config(parsed.overrides)


# Any: as in _add_inspect.
def _add_check(commands: Any) -> None:
    text = "what a run would do and need on a cluster: rules, batches, placement, memory, hand-over; nothing is started"
    parser = commands.add_parser("check", help=text, description=f"{text}. Exit code 1: it cannot run.")
    parser.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES_HELP)
    parser.add_argument("--nodes", type=int, help="machines (default: as many as the pools need)")
    parser.add_argument("--devices-per-node", type=int, help="devices of each (default: 8 GPUs)")
    parser.add_argument(
        "--device", type=str.lower, help="cpu, a100-40, a100-80, h100, h200, b200, gb200, or cuda for another GPU"
    )
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="memory of a device (default: the device's)")
    file = "YAML file with nodes, devices_per_node, device and device_memory_gib, instead of the four options"
    parser.add_argument("--cluster", type=Path, metavar="FILE", help=file)
    model = "config.json, folder or preset (such as llama3_8b) that stands for a model that is not on this machine"
    parser.add_argument("--model-config", metavar="MODEL", help=model)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_check)


def _check(parsed: argparse.Namespace) -> int:
    from megappo.cli.check import CheckArguments, check

    return check(
        CheckArguments(
            overrides=parsed.overrides,
            cluster=parsed.cluster,
            nodes=parsed.nodes,
            devices_per_node=parsed.devices_per_node,
            device=parsed.device,
            device_memory=parsed.device_memory,
            model_config=parsed.model_config,
            as_json=parsed.json,
        )
    )


# Any: as in _add_inspect.
def _add_evaluate(commands: Any) -> None:
    text = "answer the validation prompts with a model, score and judge the answers; no trainer is started"
    parser = commands.add_parser("evaluate", help=text, description=text)
    model = "the model, a Hugging Face folder (default: model.path), and overrides of the configuration, as for train"
    parser.add_argument("arguments", nargs="*", metavar="MODEL or override", help=model)
    output = "folder of what is written (default: <run.dir>/<run.name>-evaluation); an earlier one is kept aside"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    against = "folder of an earlier evaluation of the same prompts: print what this one is better by"
    parser.add_argument("--against", type=Path, metavar="DIR", help=against)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(command=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    from megappo.cli.evaluate import EvaluateArguments, run_evaluate

    return run_evaluate(
        EvaluateArguments(arguments=parsed.arguments, output=parsed.output, against=parsed.against, as_json=parsed.json)
    )


# Any: argparse has no public type for what add_subparsers returns.
def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="show what a part does with given input, or a checkpoint")
    parts = inspect.add_subparsers(required=True, metavar="part")

    text = "advantages, loss, gradient and metrics of the sequences in a JSON file"
    algorithm = parts.add_parser("algorithm", help=text, description=text)
    algorithm.add_argument("case", help='JSON file: {"sequences": [...], "algorithm": {...}}')
    algorithm.set_defaults(command=_inspect_algorithm)

    text = "which rank computes which sequences in which micro-batch"
    schedule = parts.add_parser("schedule", help=text, description=text)
    schedule.add_argument("lengths", help="JSON file: a list of sequence lengths in tokens")
    schedule.add_argument("--dp", type=int, required=True, help="data-parallel ranks")
    schedule.add_argument("--max-tokens", type=int, required=True, help="most tokens in a micro-batch")
    schedule.add_argument("--equal-counts", action="store_true", help="ranks get equal numbers of sequences")
    schedule.add_argument("--vpp-group", type=int, default=1, help="micro-batches per rank are a multiple of this")
    schedule.add_argument("--model", help="config.json (or its folder) of the model, for the cost of attention")
    schedule.set_defaults(command=_inspect_schedule)

    text = "how weights get from the trainer to the engines: buckets, bytes, extra memory, least time"
    weights = parts.add_parser("weights", help=text, description=text)
    weights.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES_HELP)
    speeds = "speed of a route's link in GB/s, for example broadcast=50 ipc=900 disk=2"
    weights.add_argument("--link-gb-s", nargs="+", default=[], metavar="ROUTE=SPEED", help=speeds)
    weights.add_argument("--tensors", action="store_true", help="add the table of all tensors to the JSON")
    weights.set_defaults(command=_inspect_weights)

    text = "what a run would read: columns, counts, lengths, first prompts as the engine gets them, rows left out"
    data = parts.add_parser("data", help=text, description=f"{text}. Exit code 1: a run would refuse it.")
    data.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES_HELP)
    data.add_argument("--samples", type=int, default=1, help="prompts of each source that are shown (default: 1)")
    data.add_argument("--json", action="store_true", help="print JSON")
    data.set_defaults(command=_inspect_data)

    text = "what is in checkpoints, whether they are whole, and whether a run can go on from them"
    code = "Exit code 1: damaged, or not to be resumed so."
    checkpoint = parts.add_parser("checkpoint", help=text, description=f"{text}. {code}")
    checkpoint.add_argument("path", type=Path, help="a run, its folder checkpoints/, a step, or a model in it")
    checkpoint.add_argument("--full", action="store_true", help="read every file, for its checksum")
    checkpoint.add_argument("--json", action="store_true", help="print JSON")
    run = "compare with the configuration of this run: override, as for train"
    checkpoint.add_argument("--config", nargs="+", metavar="override", help=run)
    checkpoint.set_defaults(command=_inspect_checkpoint)


# Any: as in _add_inspect.
def _add_replay(commands: Any) -> None:
    text = "run a phase of a recorded step again, on any layout of this machine, and print what differs"
    parser = commands.add_parser("replay", help=text, description=f"{text}. Exit code 1: something differs.")
    parser.add_argument("record", type=Path, help="folder of the record, such as runs/NAME/records/step_000012")
    parser.add_argument("overrides", nargs="*", metavar="override", help="key=value of the recorded configuration")
    phases = ("log_probs", "advantages", "update")
    parser.add_argument("--phase", required=True, choices=phases)
    layout = "axes of the models, such as tensor=2 pipeline=2 data=2, or of one: critic.parallelism.tensor=2"
    parser.add_argument("--layout", nargs="+", default=[], metavar="AXIS=SIZE", help=layout)
    weights = "the actor's weights before the update: a Hugging Face folder, or a checkpoint (of the critic's, too)"
    parser.add_argument("--weights", type=Path, metavar="DIR", help=f"{weights}; default: what the record names")
    parser.add_argument("--critic-weights", type=Path, metavar="DIR", help="likewise the critic's")
    start = "Hugging Face folder of the weights that the run began with, which are the reference policy"
    parser.add_argument("--start", type=Path, metavar="DIR", help=f"{start}; default: where the record says")
    parser.add_argument("--other-weights", action="store_true", help="take weights that are not those of the record")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu")
    tolerance = "largest difference that agrees, relative where numbers are above 1 (default: 1e-5, for float32)"
    parser.add_argument("--tolerance", type=float, default=1e-5, help=tolerance)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_replay)


def _replay(parsed: argparse.Namespace) -> int:
    from megappo.cli.replay import ReplayArguments, replay

    return replay(
        ReplayArguments(
            record=parsed.record,
            phase=parsed.phase,
            layout=parsed.layout,
            overrides=parsed.overrides,
            weights=parsed.weights,
            critic_weights=parsed.critic_weights,
            start=parsed.start,
            other_weights=parsed.other_weights,
            device=parsed.device,
            tolerance=parsed.tolerance,
            as_json=parsed.json,
        )
    )


def _inspect_weights(parsed: argparse.Namespace) -> int:
    from megappo.cli.inspect_weights import inspect_weights

    return inspect_weights(parsed.overrides, link_gb_s=parsed.link_gb_s, with_tensors=parsed.tensors)


def _inspect_data(parsed: argparse.Namespace) -> int:
    from megappo.cli.inspect_data import inspect_data

    return inspect_data(parsed.overrides, samples=parsed.samples, as_json=parsed.json)


def _inspect_checkpoint(parsed: argparse.Namespace) -> int:
    from megappo.cli.inspect_checkpoint import inspect_checkpoint

    return inspect_checkpoint(parsed.path, full=parsed.full, as_json=parsed.json, overrides=parsed.config)


def _inspect_algorithm(parsed: argparse.Namespace) -> int:
    from megappo.cli.inspect_algorithm import inspect_algorithm

    return inspect_algorithm(parsed.case)


def _inspect_schedule(parsed: argparse.Namespace) -> int:
    from megappo.cli.inspect_schedule import inspect_schedule

    return inspect_schedule(
        parsed.lengths,
        dp=parsed.dp,
        max_tokens=parsed.max_tokens,
        equal_counts=parsed.equal_counts,
        vpp_group=parsed.vpp_group,
        model=parsed.model,
    )
