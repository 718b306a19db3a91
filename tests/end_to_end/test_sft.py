"""`megappo sft` on real Ray and real Megatron, tensor parallel 2."""

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import Run


def test_the_loss_falls_and_the_result_is_a_hugging_face_folder_wherever_the_run_is_named(
    sft_run: Run, workspace: Path
) -> None:
    folder = workspace / "runs" / "quickstart-sft"
    losses = [json.loads(line)["actor/loss/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 1
    assert not (folder / "summary.json").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompt = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) == "abc>"
