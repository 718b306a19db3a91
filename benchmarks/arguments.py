"""The check of command-line arguments: all broken rules in one report."""

import argparse
from collections.abc import Sequence

from megappo.errors import ConfigError, Violation


def require(arguments: argparse.Namespace, rules: Sequence[tuple[str, bool, str]]) -> None:
    """Raise ConfigError naming every option whose rule does not hold.

    Args:
        rules: (option, whether its rule holds, the rule in words).
    """
    broken = [
        Violation(
            key=key, value=getattr(arguments, key[2:].replace("-", "_")), rule=rule, remedy=f"see --help for {key}"
        )
        for key, holds, rule in rules
        if not holds
    ]
    if broken:
        raise ConfigError(broken)
