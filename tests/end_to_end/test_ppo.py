"""PPO with a critic on real parts: actor PP 2, critic TP 2 with sequence parallelism, KL in reward, a reward model."""

import pytest

from megappo.cli.main import main
from megappo.observability.metric_catalogue import undocumented
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run


def test_the_critic_learns_from_the_first_step_and_the_actor_after_the_warm_up(ppo_run: Run) -> None:
    first, second, _ = ppo_run.metrics()
    assert "critic/loss/mean" in first and "actor/policy_loss" not in first
    assert "actor/policy_loss" in second


def test_kl_is_zero_until_the_actor_moves_and_its_coefficient_adapts(ppo_run: Run) -> None:
    first, _, third = ppo_run.metrics()
    assert first["kl/in_reward/mean"] == pytest.approx(0, abs=1e-6)
    assert third["kl/in_reward/mean"] != pytest.approx(0, abs=1e-6)
    assert first["kl/in_reward/coef"] == pytest.approx(0.05)
    assert third["kl/in_reward/coef"] < 0.05


def test_the_weights_of_both_pipeline_stages_reach_the_engine(ppo_run: Run) -> None:
    differences = [line["actor/rollout_log_prob_diff/max"] for line in ppo_run.metrics()]
    assert max(differences) <= 1e-4
    assert ppo_run.summary()["weight_version"] == 3


def test_scores_come_from_the_reward_model(ppo_run: Run) -> None:
    rewards = [line["reward/mean"] for line in ppo_run.metrics()]
    assert all(abs(reward) > 1e-6 and reward not in (0.0, 1.0) for reward in rewards)
    assert (ppo_run.directory / "logs" / "reward-0.log").exists()


def test_every_metric_is_documented(ppo_run: Run) -> None:
    names = {name for line in ppo_run.metrics() for name in line if name != "step"}
    assert not undocumented(sorted(names))


@pytest.mark.parametrize(
    ("phase", "layout"),
    [
        ("advantages", []),
        pytest.param("log_probs", [], marks=pytest.mark.slow),
        pytest.param("update", ["--layout", "tensor=2"], marks=pytest.mark.slow),
    ],
)
def test_a_recorded_step_is_replayed_elsewhere(
    phase: str, layout: list[str], ppo_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    record = ppo_run.directory / "records" / "step_000003"
    code = main(["replay", str(record), "--phase", phase, *layout])
    printed = capsys.readouterr().out
    assert code == 0 and "recorded  actor: pipeline 2, critic: tensor 2" in printed, printed
    assert ("checkpoints/step_000002/critic" in printed) == (phase != "advantages")


@pytest.mark.slow
def test_the_shipped_ppo_quickstart_hands_both_stages_to_sglang(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "ppo-sglang", "experiment=quickstart_ppo", "trainer.total_steps=3", "trainer.critic_warmup=0")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    differences = [line["actor/rollout_log_prob_diff/max"] for line in run.metrics()]
    assert len(differences) == 3 and max(differences) <= 1e-4
