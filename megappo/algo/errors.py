"""Refusals of numbers, as opposed to refusals of configuration."""

from megappo.errors import MegappoError


class AlgorithmInputError(MegappoError):
    """The algorithm cannot take what one sequence brought; names the sequence, the field, the rule and the remedy."""

    exit_code = 2

    def __init__(self, sequence: int, field: str, rule: str) -> None:
        self.sequence = sequence
        self.field = field
        self.rule = rule
        super().__init__(f"sequence {sequence}: {field} {rule}")

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.sequence, self.field, self.rule)
