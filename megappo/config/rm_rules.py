"""Rules about the reward model on Megatron workers, asked for scores or trained by `megappo rm`.

Its settings are checked by the rules of the actor, on a configuration in which they are the actor's.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from megappo.config import data_rules, file_rules, layout_rules, precision_rules, training_rules, value_rules
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.reward_rules import REWARD_MODEL, asks_reward_model
from megappo.config.run import ActorConfig, RunConfig
from megappo.config.supervised import OverLong, SftConfig, SupervisedConfig
from megappo.errors import Violation

_LAYOUT_RULES = (
    layout_rules.model_fits_its_pool,
    layout_rules.experts_fit_their_pool,
    layout_rules.sequence_parallel_needs_tensor_parallel,
    layout_rules.virtual_pipeline_needs_stages,
    value_rules.sizes_are_positive,
)
_TRAINING_RULES = (
    layout_rules.pool_of_each_role_exists,
    value_rules.amounts_are_not_negative,
    value_rules.frequencies_are_positive_or_off,
    training_rules.learning_rate_schedules_are_complete,
    training_rules.optimizer_settings_are_in_range,
    training_rules.optimizer_settings_are_used,
    training_rules.overlap_has_what_it_needs,
    training_rules.adapters_have_targets,
)


def reward_model_can_be_asked(config: RunConfig) -> list[Violation]:
    """A reward model that is asked has a folder, and a layout that fits its pool."""
    section = config.reward_model
    if not asks_reward_model(config):
        return []
    violations = _named(_as_actor(config), _LAYOUT_RULES)
    if section.path is None:
        rule, remedy = f"must be given for the reward `{REWARD_MODEL}`", "give the folder of a model of `megappo rm`"
        violations.append(Violation(key="reward_model.path", value="null", rule=rule, remedy=remedy))
    return violations


def reward_model_folder_fits(config: RunConfig) -> list[Violation]:
    """The folder of a reward model that is asked is there, and its sizes suit the layout."""
    if not asks_reward_model(config) or config.reward_model.path is None:
        return []
    return _folder_fits(config)


def reward_model_can_be_trained(config: RunConfig) -> list[Violation]:
    """The settings of `megappo rm` can be obeyed."""
    violations = _named(_as_actor(config), (*_LAYOUT_RULES, *_TRAINING_RULES))
    if config.rm.over_long is OverLong.truncate:
        rule = "would judge texts without their ends"
        violations.append(Violation(key="rm.over_long", value="truncate", rule=rule, remedy="use filter"))
    return violations


def model_to_train_fits(config: RunConfig) -> list[Violation]:
    """The model that `megappo rm` starts from, and its data, are there; the sizes suit layout and adapters."""
    return [*_folder_fits(config), *data_rules.data_files_exist(config)]


def device_can_train(config: RunConfig) -> list[Violation]:
    """What `megappo rm` asks of the device, once `auto` is settled, is there."""
    rules = (precision_rules.fp8_has_what_it_needs, precision_rules.transformer_engine_can_run)
    return _named(_as_actor(config), rules) + _folder_fits(config)


def _folder_fits(config: RunConfig) -> list[Violation]:
    key = "model.path" if config.reward_model.path is None else "reward_model.path"
    violations: list[Violation] = []
    as_actor = _as_actor(config)
    shape = file_rules.read_shape(key, as_actor.model.path, f"give a Hugging Face folder: {key}=FOLDER", violations)
    if shape is not None:
        found = layout_rules.layout_divides_model(as_actor, shape, role="actor")
        found += training_rules.recompute_fits_layers(as_actor, shape, role="actor")
        found += training_rules.adapters_fit_model(as_actor, shape, role="actor")
        found += precision_rules.fp8_divides_features(as_actor, shape, role="actor")
        violations += [_renamed(violation) for violation in found]
    return violations


def _as_actor(config: RunConfig) -> RunConfig:
    """Return a configuration whose actor is the reward model, and whose `sft` section has what `rm` has of it."""
    section, settings = config.reward_model, config.rm
    shared = {entry.name: getattr(settings, entry.name) for entry in fields(SupervisedConfig)}
    return replace(
        config,
        model=replace(config.model, path=section.path or config.model.path),
        actor=ActorConfig(
            parallelism=section.parallelism, optim=settings.optim, offload=section.offload, lora=settings.lora
        ),
        algorithm=AlgorithmConfig(),
        cluster=replace(config.cluster, actor=config.cluster.reward),
        sft=SftConfig(**shared),
    )


_NAMES = (
    ("actor.parallelism", "reward_model.parallelism"),
    ("actor.offload", "reward_model.offload"),
    ("actor.optim", "rm.optim"),
    ("actor.lora", "rm.lora"),
    ("sft.", "rm."),
    ("cluster.actor", "cluster.reward"),
)


def _named(as_actor: RunConfig, rules: Sequence[Callable[[RunConfig], list[Violation]]]) -> list[Violation]:
    """Return what breaks these rules, under the keys of the reward model, each once."""
    found = [_renamed(violation) for rule in rules for violation in rule(as_actor)]
    return [violation for index, violation in enumerate(found) if violation not in found[:index]]


def _renamed(violation: Violation) -> Violation:
    texts = [violation.key, violation.rule, violation.remedy]
    for old, new in _NAMES:
        texts = [text.replace(old, new) for text in texts]
    return replace(violation, key=texts[0], rule=texts[1], remedy=texts[2])
