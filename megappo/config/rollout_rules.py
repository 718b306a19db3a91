"""Rules about rollout engines: what they can be asked to draw, and engines that run already."""

from urllib.parse import urlsplit

from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SGLANG_CPU_CACHE_TOKENS, SGLANG_KEPT_TOKENS, SamplingConfig
from megappo.config.run import RunConfig
from megappo.errors import Violation


def sampling_can_be_obeyed(config: RunConfig) -> list[Violation]:
    """Filters, limits and ends of responses are in range, and known to the engine."""
    sections = (("rollout.sampling", config.rollout.sampling), ("rollout.validation", config.rollout.validation))
    return [
        Violation(key=f"{section}.{key}", value=value, rule=rule, remedy=remedy)
        for section, sampling in sections
        for key, value, rule, remedy in _wrong_settings(sampling, config.rollout.engine)
    ]


def _wrong_settings(sampling: SamplingConfig, engine: str) -> list[tuple[str, object, str, str]]:
    """Return key, value, rule and remedy of each setting that cannot be obeyed."""
    wrong: list[tuple[str, object, str, str]] = []
    if not 0 < sampling.top_p <= 1:
        wrong.append(("top_p", sampling.top_p, "must be in (0, 1]", "1.0 is off"))
    if sampling.top_k != -1 and sampling.top_k <= 0:
        wrong.append(("top_k", sampling.top_k, "must be positive", "-1 is off"))
    if not 0 <= sampling.min_p < 1:
        wrong.append(("min_p", sampling.min_p, "must be in [0, 1)", "0.0 is off"))
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        rule = f"must be between 0 and max_new_tokens={sampling.max_new_tokens}"
        wrong.append(("min_new_tokens", sampling.min_new_tokens, rule, "0 is off"))
    elif sampling.min_new_tokens and engine == "sglang":
        rule = "is not possible with rollout.engine=sglang: its log-probs would leave the end tokens out"
        wrong.append(("min_new_tokens", sampling.min_new_tokens, rule, "use 0, or rollout.engine=hf"))
    if any(token < 0 for token in sampling.stop_token_ids):
        wrong.append(("stop_token_ids", sampling.stop_token_ids, "must be token ids", "use ids of 0 or more"))
    if "" in sampling.stop:
        wrong.append(("stop", sampling.stop, "must not hold an empty text", "an empty list is off"))
    return wrong


def sequences_fit_the_cache(config: RunConfig) -> list[Violation]:
    """The longest prompt and response together fit into the KV cache of a server, where its size is known."""
    rollout, sglang = config.rollout, config.rollout.sglang
    cache = sglang.max_total_tokens
    if cache is None and config.cluster.device is DeviceKind.cpu:
        cache = SGLANG_CPU_CACHE_TOKENS
    responses = max(rollout.sampling.max_new_tokens, rollout.validation.max_new_tokens)
    needed = config.data.max_prompt_tokens + responses + SGLANG_KEPT_TOKENS
    if rollout.engine != "sglang" or rollout.urls or cache is None or needed <= cache:
        return []
    prompts = f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
    rule = f"is less than {prompts} plus {responses} new tokens plus the {SGLANG_KEPT_TOKENS} that SGLang keeps"
    remedy = f"use {needed} or more, times the sequences that should run at once"
    return [Violation(key="rollout.sglang.max_total_tokens", value=cache, rule=rule, remedy=remedy)]


def engines_take_a_share_of_memory(config: RunConfig) -> list[Violation]:
    """A server takes less than all device memory: what it computes with needs some, too."""
    share = config.rollout.sglang.mem_fraction_static
    if config.rollout.engine != "sglang" or config.rollout.urls or share < 1:
        return []
    key, remedy = "rollout.sglang.mem_fraction_static", "0.85 is much for GPUs of their own"
    return [Violation(key=key, value=share, rule="must be less than 1", remedy=remedy)]


def running_engines_are_named(config: RunConfig) -> list[Violation]:
    """Servers that run already are SGLang's, one per engine, each named once by its URL."""
    rollout = config.rollout
    if not rollout.urls:
        if rollout.api_key_env is None:
            return []
        rule, remedy = "is the key of rollout.urls, and there are none", "leave it out: megappo makes its own keys"
        return [Violation(key="rollout.api_key_env", value=rollout.api_key_env, rule=rule, remedy=remedy)]
    violations = [
        Violation(key="rollout.urls", value=url, rule="is not the address of a server", remedy="write http://HOST:PORT")
        for url in rollout.urls
        if not _is_server_address(url)
    ]
    if rollout.engine != "sglang":
        remedy = "use rollout.engine=sglang"
        rule = f"are SGLang servers, and rollout.engine={rollout.engine} is none"
        violations.append(Violation(key="rollout.urls", value=rollout.urls, rule=rule, remedy=remedy))
    if config.weight_sync.transport == "ipc":
        rule, remedy = "shares memory with engines that megappo starts, not with rollout.urls", "use broadcast or disk"
        violations.append(Violation(key="weight_sync.transport", value="ipc", rule=rule, remedy=remedy))
    if len(set(rollout.urls)) != rollout.num_engines:
        rule = f"must name rollout.num_engines={rollout.num_engines} different servers"
        remedy = f"use rollout.num_engines={len(set(rollout.urls))}, each with rollout.tensor devices"
        violations.append(Violation(key="rollout.urls", value=rollout.urls, rule=rule, remedy=remedy))
    return violations


def slow_engines_are_slower(config: RunConfig) -> list[Violation]:
    """An engine counts as slow only if it is slower than idle ones: else prompts move to and fro between equal ones."""
    factor = config.rollout.recovery.slow_factor
    if factor > 1:
        return []
    rule, remedy = "must be above 1", "2.0 moves prompts away from engines of half the speed"
    return [Violation(key="rollout.recovery.slow_factor", value=factor, rule=rule, remedy=remedy)]


def _is_server_address(url: str) -> bool:
    """Whether a URL holds a scheme, a host and perhaps a port: no path and no key (it would be stored with the run)."""
    try:
        parts = urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        return False
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username, parts.password)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_right and not any(rest)
