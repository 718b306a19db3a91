"""Rules between keys. Each is a function named for the rule that returns the violations it finds; none stops at the
first. `megappo config` checks what needs no file system (`check_config`); a run adds `check_files`.

To add one: write the function beside those of its kind (`value_rules`, `layout_rules`, `training_rules`,
`capability_rules`, `name_rules`, `file_rules`) and list it here.
Those of the algorithm section, which `megappo inspect algorithm` shares, are in `algorithm_rules`.
"""

from dataclasses import replace

from megappo.config import (
    agent_rules,
    capability_rules,
    checkpoint_rules,
    controller_rules,
    data_rules,
    engine_rules,
    file_rules,
    layout_rules,
    name_rules,
    parity_rules,
    precision_rules,
    profile_rules,
    record_rules,
    restart_rules,
    reward_rules,
    rm_rules,
    rollout_rules,
    supervised_rules,
    tracking_rules,
    training_rules,
    transport_rules,
    validation_rules,
    value_rules,
)
from megappo.config.algorithm import ValueLossConfig
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS
from megappo.config.algorithm_rules import algorithm_notes, algorithm_violations
from megappo.config.model_shape import random_model_shape
from megappo.config.run import RunConfig
from megappo.errors import Violation

_CONFIG_RULES = (
    value_rules.sizes_are_positive,
    value_rules.amounts_are_not_negative,
    value_rules.frequencies_are_positive_or_off,
    value_rules.object_store_is_large_enough,
    value_rules.random_model_sizes_fit,
    value_rules.mini_batch_divides_step,
    value_rules.training_samples_are_drawn,
    value_rules.resume_is_a_choice_or_path,
    value_rules.run_name_is_a_folder_name,
    value_rules.critic_warmup_needs_a_critic,
    data_rules.sources_are_complete,
    data_rules.source_numbers_are_in_range,
    data_rules.sources_are_named_one_way,
    data_rules.source_settings_are_read,
    data_rules.validation_has_prompts,
    training_rules.learning_rate_schedules_are_complete,
    training_rules.optimizer_settings_are_in_range,
    training_rules.optimizer_settings_are_used,
    training_rules.overlap_has_what_it_needs,
    training_rules.adapters_have_targets,
    training_rules.recompute_names_what_it_can,
    precision_rules.fp8_has_what_it_needs,
    precision_rules.transformer_engine_can_run,
    name_rules.plug_ins_are_known,
    name_rules.in_process_engine_has_one_device,
    rollout_rules.sampling_can_be_obeyed,
    rollout_rules.sequences_fit_the_cache,
    rollout_rules.engines_take_a_share_of_memory,
    rollout_rules.running_engines_are_named,
    rollout_rules.slow_engines_are_slower,
    agent_rules.tool_loop_has_what_it_needs,
    agent_rules.tools_have_a_program,
    reward_rules.reward_terms_replace_the_name,
    reward_rules.reward_terms_can_be_metrics,
    reward_rules.a_term_has_weight,
    reward_rules.failed_rewards_can_be_handled,
    reward_rules.length_penalties_can_bite,
    reward_rules.model_rewards_have_a_model,
    reward_rules.model_reward_workers_fit_their_pool,
    rm_rules.reward_model_can_be_asked,
    layout_rules.pool_of_each_role_exists,
    layout_rules.model_fits_its_pool,
    layout_rules.experts_fit_their_pool,
    layout_rules.engines_fit_their_pool,
    layout_rules.sequence_parallel_needs_tensor_parallel,
    layout_rules.virtual_pipeline_needs_stages,
    layout_rules.virtual_pipeline_has_micro_batches,
    transport_rules.broadcast_needs_devices_of_its_own,
    transport_rules.shared_memory_needs_shared_devices,
    transport_rules.disk_needs_a_folder_that_all_see,
    transport_rules.pauses_need_something_to_pause,
    capability_rules.bridge_cannot_be_installed_beside_the_engine,
    controller_rules.engines_beside_training_have_devices_of_their_own,
    controller_rules.early_stop_leaves_no_prompt_without_its_greedy_answer,
    parity_rules.parity_limits_are_ordered,
    tracking_rules.trackers_can_be_made,
    profile_rules.observed_steps_are_run,
    profile_rules.profiled_processes_are_there,
    profile_rules.profile_settings_are_used,
    record_rules.recorded_steps_are_run,
    record_rules.record_settings_are_used,
    record_rules.recorded_parity_has_limits,
    restart_rules.some_command_makes_checkpoints,
    checkpoint_rules.checkpoint_settings_are_used,
    checkpoint_rules.deadline_is_a_time,
    checkpoint_rules.kept_steps_are_saved,
    checkpoint_rules.best_metric_is_measured,
    validation_rules.validation_answers_differ,
    validation_rules.pass_at_has_the_answers,
    validation_rules.intervals_are_possible,
    validation_rules.validation_settings_are_used,
    validation_rules.validation_sets_have_names_for_metrics,
)

_DEVICE_RULES = (
    rollout_rules.sequences_fit_the_cache,
    rollout_rules.engines_take_a_share_of_memory,
    precision_rules.fp8_has_what_it_needs,
    precision_rules.transformer_engine_can_run,
    transport_rules.broadcast_needs_devices_of_its_own,
    transport_rules.shared_memory_needs_shared_devices,
    controller_rules.engines_beside_training_have_devices_of_their_own,
)

_FILE_RULES = (
    file_rules.model_folders_fit,
    data_rules.data_files_exist,
    file_rules.reward_model_folder_exists,
    rm_rules.reward_model_folder_fits,
    file_rules.checkpoint_to_resume_exists,
)


def check_config(config: RunConfig) -> list[Violation]:
    """Return the broken rules that can be seen without reading a file."""
    # A number that is none breaks any rule that compares it; it is refused once.
    violations = value_rules.numbers_are_finite(config)
    refused = {violation.key for violation in violations}
    found = [violation for rule in _CONFIG_RULES for violation in rule(config)]
    violations += [violation for violation in found if violation.key not in refused]
    violations += algorithm_violations(config.algorithm, samples_per_prompt=config.batching.samples_per_prompt)
    return violations + random_model_fits(config)


def random_model_fits(config: RunConfig) -> list[Violation]:
    """The model that `megappo sft` makes suits its own layout, and that of the run that starts from it."""
    if config.sft.random_model is None:
        return []
    shape = random_model_shape(config.sft.random_model)
    violations = layout_rules.layout_divides_model(config, shape, role="actor")
    violations += engine_rules.engines_hold_model(config, shape)
    violations += layout_rules.sequences_fit_positions(config, shape)
    violations += training_rules.recompute_fits_layers(config, shape, role="actor")
    violations += precision_rules.fp8_divides_features(config, shape, role="actor")
    if layout_rules.needs_critic(config) and config.critic.path is None and file_rules.is_made_by_sft(config):
        violations += layout_rules.layout_divides_model(config, shape, role="critic")
    return violations


def check_device(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the device of a training run, once `auto` is settled."""
    return [violation for rule in _DEVICE_RULES for violation in rule(config)] + file_rules.model_folders_fit(config)


def check_replay(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the models that a replay builds, on the device and layout that it was given."""
    rules = (
        value_rules.sizes_are_positive,
        layout_rules.experts_fit_their_pool,
        layout_rules.sequence_parallel_needs_tensor_parallel,
        layout_rules.virtual_pipeline_needs_stages,
        precision_rules.fp8_has_what_it_needs,
        precision_rules.transformer_engine_can_run,
        file_rules.model_folders_fit,
    )
    return [violation for rule in rules for violation in rule(config)]


def check_sft_device(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the device of `megappo sft`, once `auto` is settled."""
    violations = precision_rules.fp8_has_what_it_needs(config) + precision_rules.transformer_engine_can_run(config)
    made = config.sft.random_model is not None
    return violations + (random_model_fits(config) if made else supervised_rules.model_to_train_fits(config))


def check_data(config: RunConfig) -> list[Violation]:
    """Return the broken rules about what `megappo inspect data` reads."""
    found = [violation for violation in check_config(config) if violation.key.startswith("data.")]
    return found + data_rules.data_files_exist(config)


def check_files(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the files that a training run reads."""
    return [violation for rule in _FILE_RULES for violation in rule(config)]


def check_sft_files(config: RunConfig) -> list[Violation]:
    """Return the broken rules about what `megappo sft` does, and about the files that it reads."""
    violations = supervised_rules.supervised_run_can_be_made(config, config.sft, "sft", loss="sft/loss")
    violations += supervised_rules.one_source_is_trained_on(config, "sft")
    violations += data_rules.data_files_exist(config) + training_rules.random_models_are_trained_whole(config)
    violations += file_rules.checkpoint_to_resume_exists(config)
    if config.sft.random_model is None:
        return violations + supervised_rules.model_to_train_fits(config)
    positions = config.sft.random_model.max_position_embeddings
    return violations + supervised_rules.rows_fit_positions(config.sft, "sft", positions=positions)


def check_rm(config: RunConfig) -> list[Violation]:
    """Return the broken rules about what `megappo rm` does, and about the files that it reads."""
    loss = "reward_model/preference_loss"
    violations = supervised_rules.supervised_run_can_be_made(config, config.rm, "rm", loss=loss)
    violations += supervised_rules.one_source_is_trained_on(config, "rm")
    violations += rm_rules.reward_model_can_be_trained(config) + rm_rules.model_to_train_fits(config)
    return violations + file_rules.checkpoint_to_resume_exists(config)


def check_rm_device(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the device of `megappo rm`, once `auto` is settled."""
    return rm_rules.device_can_train(config)


def check_evaluation(config: RunConfig) -> list[Violation]:
    """Return the broken rules about what `megappo evaluate` reads, that need no file."""
    judged = _as_evaluated(config)
    found = [violation for violation in check_config(judged) if validation_rules.is_evaluated(violation.key)]
    return found + validation_rules.there_is_something_to_evaluate(config)


def check_evaluation_files(config: RunConfig) -> list[Violation]:
    """Return the broken rules about the files that it reads."""
    found = check_files(_as_evaluated(config))
    return [violation for violation in found if validation_rules.is_evaluated(violation.key)]


def check_evaluation_device(config: RunConfig) -> list[Violation]:
    """Return the broken rules about its device, once `auto` is settled."""
    return rollout_rules.sequences_fit_the_cache(_as_evaluated(config))


def _as_evaluated(config: RunConfig) -> RunConfig:
    """Return the configuration with one sampling: the lengths of training answers limit nothing here."""
    return replace(config, rollout=replace(config.rollout, sampling=config.rollout.validation))


def start_up_notes(config: RunConfig) -> list[str]:
    """Return one line for each legal setting that is likely a mistake or worth knowing."""
    notes: list[str] = []
    algorithm, batching, sampling = config.algorithm, config.batching, config.rollout.sampling
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    if batching.samples_per_prompt == 1 and estimator is not None and estimator.compares_groups:
        notes.append(
            f"batching.samples_per_prompt=1: {algorithm.advantage.name} compares the samples of one prompt, "
            "so every advantage is 0 and nothing is learned"
        )
    clip = algorithm.value_loss.clip
    if clip != ValueLossConfig().clip and not layout_rules.needs_critic(config):
        notes.append(f"algorithm.value_loss.clip={clip} has no effect: {algorithm.advantage.name} trains no critic")
    notes += algorithm_notes(algorithm)
    notes += controller_rules.controller_notes(config)
    notes += parity_rules.parity_notes(config)
    notes += checkpoint_rules.checkpoint_notes(config)
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        notes.append(
            "rollout.sampling.top_p/top_k/min_p cut the distribution that samples come from; log-probs are those of "
            "the full vocabulary, and no log-prob difference shows it"
        )
    return notes
