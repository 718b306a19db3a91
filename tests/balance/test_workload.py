import numpy as np
import pytest

from megappo.balance.workload import TOKENS, Workload, workload_of_model
from megappo.errors import DataError

DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_default_cost_is_the_number_of_tokens():
    assert TOKENS.costs([3, 0, 7]).tolist() == [3.0, 0.0, 7.0]


def test_cost_adds_the_causal_pairs_of_each_sequence_alone():
    # 3 tokens see 1 + 2 + 3 = 6 pairs, 1 token 1 pair: never the pairs of a packed run of 4 (10).
    assert Workload(pair=0.5).costs([3, 1]).tolist() == [3 + 0.5 * 6, 1 + 0.5 * 1]


def test_workload_of_a_dense_model_counts_projections_ffn_and_head():
    # Per layer: q and o 2 * 8 * 16, k and v 2 * 8 * 8, gated ffn 3 * 8 * 16; head 8 * 100; pairs 2 * 16 per layer.
    per_token = 2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16) + 8 * 100
    assert workload_of_model(DENSE).pair == pytest.approx(2 * 2 * 16 / per_token, rel=1e-12)


def test_workload_of_a_mixture_counts_router_and_active_experts_only():
    mixture = DENSE | {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    per_token = 2 * (2 * 8 * 16 + 2 * 8 * 8 + 8 * 64 + 3 * 8 * (2 * 4)) + 8 * 100
    assert workload_of_model(mixture).pair == pytest.approx(2 * 2 * 16 / per_token, rel=1e-12)


def test_head_dim_and_key_value_heads_have_the_usual_defaults():
    plain = {key: value for key, value in DENSE.items() if key not in ("head_dim", "num_key_value_heads")}
    assert workload_of_model(plain) == workload_of_model(plain | {"head_dim": 2, "num_key_value_heads": 4})


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"vocab_size": 0}, {"num_hidden_layers": "2"}])
def test_a_wrong_model_size_is_refused_by_name(change: dict):
    with pytest.raises(DataError, match=next(iter(change))):
        workload_of_model(DENSE | change)


def test_costs_of_long_sequences_do_not_overflow():
    assert Workload(pair=1.0).costs(np.array([2**31], dtype=np.int64))[0] == pytest.approx(2.0**61, rel=1e-6)
