"""The stage types: RolloutBatch (sampled) -> Experience (ready for the loss); TokenField (one computed field),
BegunBatch (what there is of answers that are not finished), TextBatch and PreferenceBatch (what a reward model reads).

Shapes: N packed tokens, B sequences. Entry t of a per-token field describes token t; entries off the mask are 0.
"""

from dataclasses import dataclass

import numpy as np

from megappo.batch.fields import PackedBatch, per_sequence, per_token


@dataclass(kw_only=True, slots=True)
class RolloutBatch(PackedBatch):
    """Sampled sequences: prompt and response tokens, and what the rollout engine said of them.

    Example:
        RolloutBatch(offsets=np.array([0, 3]), tokens=np.array([5, 6, 7], np.int32),
                     response_mask=np.array([False, True, True]),
                     rollout_log_probs=np.array([0, -0.1, -0.2], np.float32),
                     sequence_ids=np.array([0]), group_ids=np.array([0]))
    """

    offsets: np.ndarray
    """[B+1] int64."""
    tokens: np.ndarray = per_token("int32", "token ids")
    response_mask: np.ndarray = per_token(
        "bool",
        "True on tokens the policy sampled, its end tokens included; False on the prompt and on what a rollout program "
        "put between them",
    )
    rollout_log_probs: np.ndarray = per_token("float32", "log-prob of each sampled token as the engine reported it")
    sequence_ids: np.ndarray = per_sequence("int64", "id of the sequence, unique in a run")
    group_ids: np.ndarray = per_sequence("int64", "id of the draw: all samples of one drawn prompt share it")


@dataclass(kw_only=True, slots=True)
class BegunBatch(PackedBatch):
    """The answers of groups that were aborted, as far as they got: response tokens only, prompts left out. Without
    rounding, so that who goes on with it samples what would have followed.

    Example:
        BegunBatch(offsets=np.array([0, 2]), tokens=np.array([6, 7], np.int32), log_probs=np.array([-0.1, -0.2]),
                   versions=np.array([3, 4]), sequence_ids=np.array([0]), group_ids=np.array([0]),
                   ends=np.array([0], np.int8))
    """

    offsets: np.ndarray
    """[B+1] int64."""
    tokens: np.ndarray = per_token("int32", "token ids")
    log_probs: np.ndarray = per_token("float64", "log-prob of each token as the engine reported it")
    versions: np.ndarray = per_token("int64", "version of the weights that sampled the token; 0 where none did")
    sequence_ids: np.ndarray = per_sequence("int64", "id of the sequence")
    group_ids: np.ndarray = per_sequence("int64", "id of the draw")
    ends: np.ndarray = per_sequence("int8", "0: goes on, 1: ended by an end token, 2: by its length")
    marks: np.ndarray | None = per_token(
        "int8",
        "of rollout programs: 0 sampled and not the last token of its call, 1 and 2 the last one of a call that ended "
        "as in `ends`, 3 not sampled",
        optional=True,
    )
    seconds: np.ndarray | None = per_sequence("float64", "of rollout programs: time spent on it", optional=True)


@dataclass(kw_only=True, slots=True)
class TokenField(PackedBatch):
    """One computed number per token, in the order of the batch it was computed from.

    Example: TokenField(offsets=batch.offsets, values=log_probs, sequence_ids=batch.sequence_ids)
    """

    offsets: np.ndarray
    """[B+1] int64."""
    values: np.ndarray = per_token("float32", "the number; 0 off the response mask")
    sequence_ids: np.ndarray = per_sequence("int64", "id of the sequence")


@dataclass(kw_only=True, slots=True)
class Experience(PackedBatch):
    """Sequences with all that the losses need. `loss_mask` is the response mask after truncation and rejection.

    Example: Experience(**shared_fields, old_log_probs=..., advantages=..., loss_mask=...)
    """

    offsets: np.ndarray
    """[B+1] int64."""
    tokens: np.ndarray = per_token("int32", "token ids")
    response_mask: np.ndarray = per_token("bool", "True on tokens the policy sampled")
    rollout_log_probs: np.ndarray = per_token("float32", "log-prob as the engine reported it")
    sequence_ids: np.ndarray = per_sequence("int64", "id of the sequence")
    group_ids: np.ndarray = per_sequence("int64", "id of the draw")
    loss_mask: np.ndarray = per_token("bool", "True on tokens that take part in the loss")
    advantages: np.ndarray = per_token("float32", "advantage before whitening")
    old_log_probs: np.ndarray | None = per_token(
        "float32", "log-prob before the update; absent: the detached log-prob of the update itself", optional=True
    )
    ref_log_probs: np.ndarray | None = per_token("float32", "log-prob under the reference policy", optional=True)
    values: np.ndarray | None = per_token("float32", "critic value before the token", optional=True)
    returns: np.ndarray | None = per_token("float32", "target of the critic", optional=True)
    correction_weights: np.ndarray | None = per_token("float32", "importance weight of the rollout", optional=True)


@dataclass(kw_only=True, slots=True)
class TextBatch(PackedBatch):
    """Whole texts for a reward model. Behind each is one entry more, 0, for the place after the text: models read every
    entry of a sequence but the last, and what they say there of the last one is said of the whole text.

    Example: TextBatch(offsets=np.array([0, 4]), tokens=np.array([5, 6, 7, 0], np.int32), sequence_ids=np.array([0]))
    """

    offsets: np.ndarray
    """[B+1] int64."""
    tokens: np.ndarray = per_token("int32", "token ids, and 0 behind each text")
    sequence_ids: np.ndarray = per_sequence("int64", "id of the text")

    @property
    def ends(self) -> np.ndarray:
        """The entries behind the texts, [N] bool."""
        found = np.zeros(self.num_tokens, bool)
        found[self.offsets[1:] - 1] = True
        return found


@dataclass(kw_only=True, slots=True)
class PreferenceBatch(TextBatch):
    """Pairs of texts of which one is preferred, as a reward model is trained on them.

    Example: PreferenceBatch(..., pair_ids=np.array([3, 3]), is_chosen=np.array([True, False]),
                             margins=np.array([0, 0], np.float32))
    """

    pair_ids: np.ndarray = per_sequence("int64", "id of the pair: the two texts of one share it")
    is_chosen: np.ndarray = per_sequence("bool", "True on the preferred one")
    margins: np.ndarray = per_sequence("float32", "by how much its score should be the higher one; the same for both")
