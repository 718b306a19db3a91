"""`megappo config`: the configuration of a run, resolved and checked, without touching its files."""

import sys
from collections.abc import Sequence

from megappo.config.rules import start_up_notes
from megappo.config.store import load_run_config, resolved_yaml


def print_config(overrides: Sequence[str]) -> int:
    """Print the resolved configuration as YAML to stdout and notes on it to stderr. Returns the exit code.

    Raises:
        ConfigError: listing every violation of types and rules.
    """
    config = load_run_config(overrides)
    print(resolved_yaml(config), end="")
    for note in start_up_notes(config):
        print(f"note: {note}", file=sys.stderr)
    return 0
