"""What a person reads, on a terminal and off it."""

import io
import re

from megappo.observability.console import AnswerRow, RunConsole, duration
from megappo.observability.step_line import describe_split, describe_step

STEP = {
    "reward/mean": 0.6412,
    "kl/in_reward/mean": 0.00031,
    "actor/approx_kl": 0.5,
    "actor/entropy/mean": 0.4121,
    "rollout/response_tokens/mean": 4.96,
    "perf/tokens_per_s": 2310.4,
    "timing/step_s": 1.25,
    "timing/generate_s": 0.7,
    "timing/score_s": 0.01,
    "timing/log_probs_s": 0.1,
    "timing/update_critic_s": 0.2,
    "timing/update_actor_s": 0.21,
    "timing/weight_sync_s": 0.02,
}


def plain_output(use: "object") -> str:
    file = io.StringIO()
    with RunConsole(file=file, terminal=False) as console:
        use(console)  # type: ignore[operator]
    return file.getvalue()


def test_the_line_of_a_step_has_all_numbers_and_the_split_of_its_time() -> None:
    output = plain_output(lambda console: console.step(12, 180, STEP))
    assert output == (
        "step 12/180  reward 0.641  KL 0.00031  entropy 0.412  length 5.0  tokens/s 2,310  "
        "1.25 s = generate 0.70 + score 0.01 + log-probs 0.10 + update 0.41 + hand-over 0.02\n"
    )


def test_numbers_that_are_absent_are_left_out() -> None:
    assert describe_step({"reward/mean": 1.0}) == "reward 1.000"
    assert describe_split({}) == ""


def test_generation_beside_training_is_no_part_of_the_step() -> None:
    beside = STEP | {"timing/wait_for_rollouts_s": 0.3}
    assert describe_split(beside) == "1.25 s = wait 0.30 + log-probs 0.10 + update 0.41 + hand-over 0.02"


def test_utilisation_is_shown_where_it_is_known() -> None:
    assert describe_step({"perf/tokens_per_s": 2000.0, "perf/mfu/actor_update": 0.413}) == "tokens/s 2,000  MFU 41%"


def test_kl_to_the_reference_is_shown_before_kl_to_the_last_policy() -> None:
    assert "KL 0.5" in describe_step({"actor/approx_kl": 0.5})
    assert "KL 0.00031" in describe_step(STEP)


def test_phases_are_named_when_they_begin_with_the_elapsed_time() -> None:
    output = plain_output(lambda console: (console.phase("starting Ray"), console.phase("starting the [actor]")))
    assert re.fullmatch(r"\[ +\d+\.\d s\] starting Ray\n\[ +\d+\.\d s\] starting the \[actor\]\n", output)


def test_off_a_terminal_there_are_no_control_characters() -> None:
    def use(console: RunConsole) -> None:
        console.phase("starting Ray")
        console.step(1, 2, STEP)
        console.table("Run", [("steps", "2")])

    assert "\x1b" not in plain_output(use)
    assert "\r" not in plain_output(use)


def test_lines_to_copy_are_never_wrapped() -> None:
    command = "mlflow ui --backend-store-uri sqlite:////" + "long/" * 60 + "mlflow.db"
    assert f"  {command}\n" in plain_output(lambda console: console.lines("To open it", [command]))


def test_on_a_terminal_a_bar_and_the_time_left_are_shown_and_taken_away() -> None:
    file = io.StringIO()
    with RunConsole(file=file, terminal=True) as console:
        console.phase("starting Ray")
        console.step(12, 180, STEP)
        console.note("validation")
    output = file.getvalue()
    assert "step 12/180" in output
    # (180 - 12) * 1.25 s
    assert "about 3 min 30 s left" in output
    assert output.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in output  # the cursor is given back


def test_sampled_text_cannot_drive_the_terminal() -> None:
    row = AnswerRow(prompt="> abc\n", before="\x1b[31mx", before_score=0.0, after="[red]cba", after_score=1.0)
    output = plain_output(lambda console: console.answers([row]))
    assert "\x1b" not in output
    assert "\\x1b[31mx" in output
    assert "[red]cba" in output
    assert "1.00" in output


def test_no_answers_print_nothing() -> None:
    assert plain_output(lambda console: console.answers([])) == ""


def test_durations_in_words() -> None:
    assert (duration(45.4), duration(60), duration(185)) == ("45 s", "1 min 00 s", "3 min 05 s")
