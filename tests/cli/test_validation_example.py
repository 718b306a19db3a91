"""The example of validation sets in docs/evaluation.md is a command that works."""

import shlex
from pathlib import Path

from megappo.config.rules import check_config
from megappo.config.store import load_run_config
from megappo.data.sources import read_rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_the_quickstart_has_the_two_sets_of_the_document() -> None:
    command = DOCUMENT.read_text().partition("```\nmegappo train ")[2].partition("```")[0]
    config = load_run_config(shlex.split(command.replace("\\\n", "")), rules=(check_config,))
    rows = {name: read_rows(source) for name, source in config.data.validating().items()}
    lengths = {name: {len(row.text) for row in found} for name, found in rows.items()}
    assert lengths == {"short": {3}, "longer": {6}}
