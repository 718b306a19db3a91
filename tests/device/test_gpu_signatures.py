"""Calls into packages that only a GPU machine has, held against these packages' own source.

Transformer Engine cannot be imported here, so what is called is written down in TRANSFORMER_ENGINE, once read off the
releases VERSIONS: the oldest that setup.py admits, and the newest there was. `make test-signatures` fetches both and
holds the table against them; every test run holds our calls, and Megatron's on our behalf, against the table.
"""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path

import megatron.core
import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megappo.config.model import Fp8Recipe
from megappo.models import layer_specs, precision
from megappo.models.precision import fp8_options

MEGATRON = Path(megatron.core.__file__).parent
VERSIONS = ("2.8.0", "2.20.2")
SOURCES = Path(__file__).parents[2] / ".gpu-sources"

# (file, function or class) -> arguments it takes by name, as far as they are used.
TRANSFORMER_ENGINE = {
    ("common/recipe/__init__.py", "DelayedScaling"): {
        "margin",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "fp8_dpa",
        "fp8_mha",
    },
    ("common/recipe/__init__.py", "Float8BlockScaling"): {"fp8_format", "fp8_dpa"},
    ("common/recipe/__init__.py", "MXFP8BlockScaling"): {"fp8_format", "fp8_dpa"},
    ("pytorch/fp8.py", "fp8_autocast"): {"enabled", "fp8_recipe", "fp8_group"},
    ("pytorch/fp8.py", "check_fp8_support"): set(),
    ("pytorch/fp8.py", "check_fp8_block_scaling_support"): set(),
    ("pytorch/fp8.py", "check_mxfp8_support"): set(),
    ("pytorch/module/linear.py", "Linear"): {
        "in_features",
        "out_features",
        "sequence_parallel",
        "fuse_wgrad_accumulation",
        "tp_group",
        "tp_size",
        "get_rng_state_tracker",
        "init_method",
        "bias",
        "return_bias",
        "parallel_mode",
    },
    ("pytorch/module/rmsnorm.py", "RMSNorm"): {
        "hidden_size",
        "eps",
        "sequence_parallel",
        "zero_centered_gamma",
        "params_dtype",
    },
    ("pytorch/optimizers/fused_adam.py", "FusedAdam"): {
        "params",
        "lr",
        "weight_decay",
        "betas",
        "eps",
        "adam_w_mode",
        "capturable",
    },
    ("pytorch/optimizers/fused_sgd.py", "FusedSGD"): {"params", "lr", "weight_decay", "momentum"},
}
# Given by Megatron to a recipe that no longer has it; pydantic's dataclasses drop what they do not know.
DROPPED = {"override_linear_precision"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls_of(tree: ast.AST, name: str) -> list[set[str]]:
    """Names of the keyword arguments of every call of `name` (or of anything.name)."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            found.append({keyword.arg for keyword in node.keywords if keyword.arg is not None})
    return found


def definition_in(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef:
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    return found


def arguments_of(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}


def taken_by(definition: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Arguments by name: of a function, of a class's __init__, or the fields of a dataclass."""
    if isinstance(definition, ast.FunctionDef):
        return arguments_of(definition)
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return arguments_of(node)
    fields = [node.target for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in fields if isinstance(target, ast.Name)}


def known(name: str) -> set[str]:
    (found,) = [arguments for (_, entry), arguments in TRANSFORMER_ENGINE.items() if entry == name]
    return found


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("fp8_utils.py", "Float8BlockScaling"),
        ("fp8_utils.py", "MXFP8BlockScaling"),
        ("fp8_utils.py", "fp8_autocast"),
        ("extensions/transformer_engine.py", "RMSNorm"),
    ],
)
def test_what_megatron_calls_in_transformer_engine_takes_its_arguments(file: str, name: str) -> None:
    calls = calls_of(parse(MEGATRON / file), name)
    assert calls, f"Megatron does not call {name} in {file} any more"
    for arguments in calls:
        assert arguments <= known(name)


def test_megatrons_delayed_scaling_takes_its_arguments() -> None:
    recipe = definition_in(parse(MEGATRON / "extensions/transformer_engine.py"), "TEDelayedScaling")
    (arguments,) = calls_of(recipe, "__init__")
    assert arguments - known("DelayedScaling") <= DROPPED
    assert {ast.unparse(base) for base in recipe.bases} == {"te.common.recipe.DelayedScaling"}  # type: ignore[union-attr]


def test_megatrons_optimizers_take_their_arguments() -> None:
    tree = parse(MEGATRON / "optimizer/__init__.py")
    dictionaries = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [{key.value for key in node.keys if isinstance(key, ast.Constant)} for node in dictionaries]
    adam = [names for names in keys if "betas" in names]
    assert adam and all(names <= known("FusedAdam") for names in adam)
    sgd = [arguments for arguments in calls_of(tree, "SGD") if "momentum" in arguments]
    assert sgd and all(arguments <= known("FusedSGD") for arguments in sgd)


def test_our_layer_specs_give_megatron_what_it_takes() -> None:
    tree = parse(Path(layer_specs.__file__))
    taken = set(inspect.signature(get_gpt_layer_with_transformer_engine_spec).parameters)
    calls = calls_of(tree, "get_gpt_layer_with_transformer_engine_spec")
    assert calls and all(arguments <= taken for arguments in calls)
    norm = definition_in(parse(MEGATRON / "extensions/transformer_engine.py"), "TENorm")
    # Megatron builds a norm with these (transformer/transformer_block.py).
    new = next(node for node in norm.body if isinstance(node, ast.FunctionDef) and node.name == "__new__")  # type: ignore[union-attr]
    assert {"config", "hidden_size", "eps"} <= arguments_of(new)


def method_of(definition: ast.ClassDef | ast.FunctionDef, name: str) -> ast.FunctionDef | None:
    found = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[0] if found else None


def test_a_layer_beside_which_an_adapter_lies_takes_one_input_and_gives_output_and_bias() -> None:
    """What `megappo.models.low_rank.AdaptedLinear` calls."""
    tree = parse(MEGATRON / "extensions/transformer_engine.py")
    linear = definition_in(tree, "TELinear")
    forward, start = method_of(linear, "forward"), method_of(linear, "__init__")
    assert forward is not None and [argument.arg for argument in forward.args.args] == ["self", "x"]
    given = {ast.unparse(node) for node in ast.walk(forward) if isinstance(node, ast.Return)}
    # Transformer Engine's own pair where it gives one (`te_return_bias`), else a pair made here.
    assert given == {"return out", "return (out, None)"}
    assert start is not None and all(arguments <= known("Linear") for arguments in calls_of(start, "__init__"))
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        layer = definition_in(tree, name)
        assert isinstance(layer, ast.ClassDef) and [ast.unparse(base) for base in layer.bases] == ["TELinear"]
        assert method_of(layer, "forward") is None


@pytest.mark.parametrize(
    ("file", "layer"), [("transformer/attention.py", "linear_qkv"), ("transformer/mlp.py", "linear_fc1")]
)
def test_a_layer_whose_norm_is_outside_is_built_with_arguments_it_takes(file: str, layer: str) -> None:
    """What `megappo.models.layer_specs` puts in the place of layers with a norm inside."""
    column = definition_in(parse(MEGATRON / "extensions/transformer_engine.py"), "TEColumnParallelLinear")
    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(parse(MEGATRON / file))
        if isinstance(node, ast.Call)
        # Built by a function of the submodule (0.16), or by calling it (0.19).
        and f"submodules.{layer}" in [ast.unparse(part) for part in (node.func, *node.args[:1])]
    ]
    assert calls and all(arguments <= taken_by(column) for arguments in calls)
    assert {"input_layernorm", "pre_mlp_layernorm"} <= {
        field.name for field in dataclasses.fields(TransformerLayerSubmodules)
    }


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_our_fp8_options_are_fields_of_megatron_with_values_it_knows(recipe: Fp8Recipe) -> None:
    hints = typing.get_type_hints(TransformerConfig)
    assert {field.name for field in dataclasses.fields(TransformerConfig)} >= set(fp8_options(recipe))
    for name in ("fp8", "fp8_recipe", "fp8_amax_compute_algo"):
        value = fp8_options(recipe).get(name)
        choices = [choice for part in (hints[name], *typing.get_args(hints[name])) for choice in typing.get_args(part)]
        assert value is None or value in choices


def test_our_fp8_checks_are_functions_of_transformer_engine_without_arguments() -> None:
    tree = parse(Path(precision.__file__))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fp8"
    }
    assert len(used) == 3 and all(known(name) == set() for name in used)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_says_what_transformer_engine_says(version: str) -> None:
    folder = SOURCES / version / "transformer_engine"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: `make test-signatures` fetches it")
    for (file, name), arguments in TRANSFORMER_ENGINE.items():
        tree = parse(folder / file)
        if file == "pytorch/fp8.py" and name in imported_from_quantization(tree):
            tree = parse(folder / "pytorch/quantization.py")
        taken = taken_by(definition_in(tree, name))
        assert arguments <= taken if arguments else taken == set(), f"{version} {file} {name} takes {taken}"
        assert not DROPPED & taken, f"{version}: {name} has {DROPPED & taken} again"
    # Under the name by which `megappo.models.lora` finds it, of a layer that is not cut into several parameters.
    linear = (folder / "pytorch/module/linear.py").read_text(encoding="utf-8")
    assert 'self.weight_names = ["weight"]' in linear


def imported_from_quantization(tree: ast.Module) -> set[str]:
    """Names that newer releases have moved, and still give under the old module."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "quantization"]
    return {alias.name for node in imports for alias in node.names}
