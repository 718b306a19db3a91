"""The presets of the algorithm section."""

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from megappo.cli.algorithm_section import parse_algorithm
from megappo.config.algorithm import AlgorithmConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithm"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset_of(name: str) -> AlgorithmConfig:
    """Return a preset as a run would have it, with the values that only a run can give."""
    run = {"rollout": {"sampling": {"max_new_tokens": 64}}, "algorithm": OmegaConf.load(FOLDER / f"{name}.yaml")}
    given = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(run), resolve=True))["algorithm"]
    if name == "gdpo":
        given["advantage"]["reward_keys"] = ["correct"]
    sampling = given.pop("sampling", {})
    algorithm = parse_algorithm(given)
    algorithm.sampling.max_rounds = sampling.get("max_rounds", 0)
    return algorithm
