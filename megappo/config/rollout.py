"""Rollout engines and sampling."""

from dataclasses import dataclass, field
from enum import Enum

from megappo.config.model import Dtype, ModelConfig
from megappo.config.parity import ParityConfig

SGLANG_CPU_CACHE_TOKENS = 8192
"""KV cache on a CPU where the configuration names none: SGLang would take half of the machine's memory."""

SGLANG_KEPT_TOKENS = 6
"""Tokens that SGLang 0.5.23 keeps of its context and of its cache: it refuses a prompt (also one with what was begun)
that leaves fewer, and silently samples up to 2 tokens less than it was asked (srt/managers/tp_worker.py,
max_req_input_len; scheduler.py, max_req_len)."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How responses are drawn.

    What narrows the choice of a token (top_k, top_p, min_p, min_new_tokens) leaves log-probs alone: they are those of
    logits / temperature over all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out; 0: none."""
    max_new_tokens: int = 256
    """Most response tokens, the end token included; of a rollout program all its turns, and what it puts between."""
    min_new_tokens: int = 0
    """End and stop tokens do not come before so many others (engine hf only)."""
    stop_token_ids: list[int] = field(default_factory=list[int])
    """Tokens that end a response, as the end tokens of the model folder do; they are part of it."""
    stop: list[str] = field(default_factory=list[str])
    """Texts that end a response, with the token that completes them."""


@dataclass(kw_only=True, slots=True)
class SGLangConfig:
    """Settings of one SGLang server."""

    attention_backend: str | None = None
    """None: SGLang's own choice on CUDA, torch_native on CPU."""
    mem_fraction_static: float = 0.5
    """Share of device memory for weights and KV cache."""
    max_total_tokens: int | None = None
    """KV cache size in tokens; None: from mem_fraction_static, and 8192 on CPU."""
    max_running_requests: int = 256
    extra_args: dict[str, str] = field(default_factory=dict)
    """More command-line options of the server, name without dashes to value ('' for a switch)."""


@dataclass(kw_only=True, slots=True)
class PartialConfig:
    """Over-sampling with early stop: engines work on more prompts than a step trains and are stopped once enough groups
    are complete; the unfinished ones go on in the next step, with what they have and what is left of their tokens.

    Who finishes first is short: while a run goes on, a step trains on shorter answers than the policy gives, and the
    long ones follow a step or more later, begun by older weights (`rollout/partial/*`, `rollout/policy_lag/*`). Nothing
    is lost, and every prompt is trained on once it is complete; that each step is biased is the price of its speed.
    """

    extra_prompts: int = 0
    """Prompts under way beyond those that the step trains; 0: off, a step waits for its slowest answer."""


@dataclass(kw_only=True, slots=True)
class RecoveryConfig:
    """What happens to an engine that dies, hangs or answers with errors: its prompts go on at the others (or wait for
    it), it is started anew and gets the current weights before it takes prompts."""

    max_restarts: int = 3
    """Restarts of one engine within an hour before it is given up; the run ends when none is left. 0: the first
    failure ends the run."""
    backoff_s: float = 1.0
    """Wait before the first of them; each next one waits twice as long."""
    max_backoff_s: float = 60.0
    health_interval_s: float = 5.0
    """Time between two questions whether an engine that has prompts is well."""
    hang_timeout_s: float = 60.0
    """An engine that has not been well for so long is started anew. It does not answer while it computes one batch."""
    slow_factor: float = 2.0
    """Prompts move away from an engine that needs so many times as long for them as idle ones would (what it has
    sampled goes with them)."""


SINGLE_TURN = "single_turn"
"""The rollout program of which an engine needs to know nothing."""


@dataclass(kw_only=True, slots=True)
class ToolLoopConfig:
    """rollout.agent=tool_loop: the model calls functions and reads what they return, until it answers."""

    tools: list[str] = field(default_factory=list[str])
    """Typed python functions, `package.module:function`; names, parameters and docstrings are shown to the model."""
    show_tools: bool = True
    """Show them through the chat template; false for a model that knows them, or a template that shows none."""
    format: str = "hermes"
    """How a call is written (`megappo.rollout.agents.tool_formats.TOOL_FORMATS`): hermes
    (<tool_call>{...}</tool_call>), json (the turn is one call), pythonic ([name(key=value)]), or
    `package.module:function`."""
    max_turns: int = 8
    """Most turns of the model. One that calls a tool in the last of them is cut short: it ends by length."""
    max_observation_tokens: int = 256
    """Most tokens of one tool's answer; the rest is cut off."""
    tool_timeout_s: float = 10.0
    """Longest time of one tool call; the model is told of one that takes longer."""
    timeout_s: float = 300.0
    """Longest time of one sample, tools and engine together; it then ends by length with what it has."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engines."""

    agent: str = SINGLE_TURN
    """The program that makes one sample of calls to the engine (`megappo.rollout.agents.AGENTS`): single_turn,
    tool_loop, or `package.module:Class`."""
    tool_loop: ToolLoopConfig = field(default_factory=ToolLoopConfig)
    engine: str = "sglang"
    """Registry name (`megappo.rollout.ENGINES`): sglang, or hf (in-process transformers generate)."""
    num_engines: int = 1
    tensor: int = 1
    """Tensor-parallel devices of one engine."""
    dtype: Dtype | None = None
    """Of the engines' weights, to which they are converted on the way; None: model.dtype."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Sampling of validation; temperature 0 is greedy."""
    partial: PartialConfig = field(default_factory=PartialConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    urls: list[str] = field(default_factory=list[str])
    """SGLang servers that run already, one per engine (http://HOST:PORT); empty: megappo starts its own. They are never
    started anew or stopped."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the servers in `urls`; null: they ask for none."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    """Longest time of one generate call. A response that takes longer is interrupted and goes on, with what it has, in
    another call; a call in which the engine samples nothing at all is a failure of the engine."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    """Watch over the difference between the log-probs of engines and trainer."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    def weight_dtype(self, model: ModelConfig) -> Dtype:
        """Return the type of the engines' weights, in which they also travel."""
        return self.dtype or model.dtype


class PauseMode(Enum):
    """What becomes of sequences under way while new weights are handed over (see `WeightSyncConfig.pause`)."""

    retract = "retract"
    """They go back to the queue; what they have sampled stays, their cache is computed again with the new weights."""
    in_place = "in_place"
    """They go on with the cache that the old weights computed: nothing is computed again, and their further tokens are
    of the new weights over what the old ones have read."""
    abort = "abort"
    """They end with what they have, to be continued by a later generate call."""
    wait = "wait"
    """They are waited for; new ones do not begin meanwhile. Must end within `timeout_s`."""


class VerifyMode(Enum):
    """How much of a hand-over is compared, by checksums, with what the engines then hold."""

    none = "none"
    sampled = "sampled"
    """A few tensors, others each time. After a failed attempt: all of them."""
    full = "full"
    """All tensors that the engine can read back. What of a model cannot is named at the start of a run: SGLang's
    experts on CUDA, what it pads on a CPU, and fused experts that several ranks of the trainer send."""


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """Hand-over of trained weights to the rollout engines."""

    transport: str = "broadcast"
    """Registry name (`megappo.weight_sync.TRANSPORTS`): broadcast (NCCL, gloo on a CPU), ipc (through memory that
    trainer and engine share: engines on the trainer's own devices), disk (a model folder that all see)."""
    bucket_bytes: int = 512 * 1024**2
    """Bytes gathered and sent at a time."""
    timeout_s: float = 120.0
    """Longest time of one attempt at a hand-over, from its begin until all engines answer with the version, however
    many buckets there are. Joining new groups before it may take as long again."""
    pause: PauseMode = PauseMode.wait
    """With controller=one_step_off: `wait` ends the sampling of the next step before the hand-over, so that one version
    samples a sequence; with the other values it goes on, by the new weights, and a slow answer holds up neither. The
    synchronous loop has nothing under way by then."""
    retries: int = 1
    """How often a hand-over that failed is tried again with the same engines before one that failed is restarted."""
    verify: VerifyMode = VerifyMode.sampled
    folder: str | None = None
    """Of transport=disk: where model folders are written, seen by the trainer and by all engines under this name:
    in a folder of the run's name inside it, in which only the last verified version stays. Must be given where the run
    spreads over machines. None: in the folder of the run."""
