"""Options of `megappo convert` and `megappo export`; what they do is in `convert`, which takes seconds to import."""

import argparse
import re
from pathlib import Path
from typing import Any

_DTYPES = ("float32", "bfloat16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# Any: argparse has no public type for what add_subparsers returns.
def add_convert(commands: Any) -> None:
    """Add the command `convert`."""
    text = "model folders and checkpoints into each other"
    parser = commands.add_parser("convert", help=text, description=f"Turn {text}; docs/conversion.md tells more.")
    forms = parser.add_subparsers(required=True, metavar="form")
    _add_hf_to_megatron(forms)
    _add_megatron_to_hf(forms)
    _add_reshard(forms)
    _add_verify(forms)


# Any: as in add_convert.
def add_export(commands: Any) -> None:
    """Add the command `export`."""
    text = "write the actor of a run's checkpoint as a Hugging Face folder, while the run goes on"
    parser = commands.add_parser("export", help=text, description=text)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="folder of the run, such as runs/NAME")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/hf/step_NNNNNN")
    _add_role(parser)
    _add_hf_output(parser)
    _add_writing(parser)
    parser.set_defaults(command=_export)


# Any: as in add_convert.
def _add_hf_to_megatron(forms: Any) -> None:
    text = "a Hugging Face folder into the weights of a Megatron checkpoint (torch_dist)"
    cut = "It loads under any layout; cut for the one that will read it, every rank reads its own bytes only."
    parser = forms.add_parser("hf-to-megatron", help=text, description=f"{text}. {cut}")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face folder with safetensors")
    _add_out(parser)
    _add_layout(parser)
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: that of the folder)")
    _add_writing(parser)
    parser.set_defaults(command=_hf_to_megatron)


# Any: as in add_convert.
def _add_megatron_to_hf(forms: Any) -> None:
    text = "the weights of a checkpoint into a Hugging Face folder"
    parser = forms.add_parser("megatron-to-hf", help=text, description=text)
    _add_checkpoint(parser)
    _add_out(parser)
    _add_role(parser)
    _add_hf_output(parser)
    _add_writing(parser)
    parser.set_defaults(command=_megatron_to_hf)


# Any: as in add_convert.
def _add_reshard(forms: Any) -> None:
    text = "a checkpoint rewritten for another layout"
    why = (
        "Not needed to load it under another layout, which every checkpoint does. It makes that load faster where many "
        "ranks would each read whole tensors to keep a part, and with --weights-only the folder smaller."
    )
    parser = forms.add_parser("reshard", help=text, description=f"{text}. {why}")
    _add_checkpoint(parser)
    _add_out(parser)
    _add_layout(parser)
    _add_role(parser)
    parser.add_argument("--weights-only", action="store_true", help="write the weights of one model, nothing to resume")
    _add_source(parser)
    _add_writing(parser)
    parser.set_defaults(command=_reshard)


# Any: as in add_convert.
def _add_verify(forms: Any) -> None:
    text = "whether a checkpoint is as it was written, or holds the weights of a Hugging Face folder"
    parser = forms.add_parser("verify", help=text, description=f"{text}. Exit code 1: it is not, or does not.")
    _add_checkpoint(parser)
    parser.add_argument("--hf", type=Path, metavar="DIR", help="compare with this folder, tensor by tensor")
    _add_role(parser)
    limit = "largest difference that counts as the same (default: 0, and the types must be the same, too)"
    parser.add_argument("--tolerance", type=float, metavar="X", help=limit)
    _add_processes(parser)
    parser.set_defaults(command=_verify)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "a checkpoint (RUN/checkpoints/step_000040), a model in it, or a converted folder"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=text)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="appears when it is whole")


def _add_role(parser: argparse.ArgumentParser) -> None:
    text = "which model of the checkpoint (default: actor)"
    parser.add_argument("--role", choices=("actor", "critic", "reward_model"), help=text)


def _add_source(parser: argparse.ArgumentParser) -> None:
    text = "Hugging Face folder of the model (default: beside the weights, or what the run started from)"
    parser.add_argument("--hf", type=Path, metavar="DIR", help=text)


def _add_hf_output(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the weights (default: that of the checkpoint)")
    size = "largest weight file, such as 500MB or 5GB (default); a larger tensor has one of its own"
    parser.add_argument("--max-shard-size", type=_bytes, default=_bytes("5GB"), metavar="SIZE", help=size)
    alone = "write the adapters alone, as PEFT has them, instead of their sum with the model"
    parser.add_argument("--adapters-only", action="store_true", help=alone)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    for option, text in (
        ("--tp", "tensor-parallel ranks"),
        ("--pp", "pipeline stages"),
        ("--ep", "ranks over which experts are spread"),
        ("--etp", "ranks that share one expert"),
    ):
        parser.add_argument(option, type=int, default=1, metavar="N", help=f"{text} of the layout (default: 1)")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check, print the table of all tensors, write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote to --out")
    _add_processes(parser)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    text = "processes to start on this machine (default: 1; under torchrun its own are used)"
    parser.add_argument("--processes", type=int, default=1, metavar="N", help=text)


def _bytes(text: str) -> int:
    """Return the bytes of a size such as 5GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    if found is None or found.group(2) not in _UNITS or not float(found.group(1)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size (write for example 500MB or 5GB)")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


def _hf_to_megatron(parsed: argparse.Namespace) -> int:
    from megappo.cli.convert import hf_to_megatron

    return hf_to_megatron(parsed)


def _megatron_to_hf(parsed: argparse.Namespace) -> int:
    from megappo.cli.convert import megatron_to_hf

    return megatron_to_hf(parsed)


def _reshard(parsed: argparse.Namespace) -> int:
    from megappo.cli.convert import reshard

    return reshard(parsed)


def _verify(parsed: argparse.Namespace) -> int:
    from megappo.cli.convert import verify

    return verify(parsed)


def _export(parsed: argparse.Namespace) -> int:
    from megappo.cli.export import export

    return export(parsed)
