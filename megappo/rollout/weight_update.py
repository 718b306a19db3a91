"""What an engine may do with its weights: a hand-over that began must end well before anything is generated."""

from collections.abc import Iterable, Mapping

from megappo.errors import EngineError, listed


def refuse_other_shapes(name: str, tensors: Iterable[tuple[str, list[int]]], known: Mapping[str, list[int]]) -> None:
    """Raise EngineError where a tensor that engine `name` knows has another shape; unknown ones are not judged here."""
    for tensor, shape in tensors:
        if known.get(tensor, shape) != shape:
            raise EngineError(f"{name}: load weights: {tensor} has shape {known[tensor]}, and {shape} came")


class WeightUpdate:
    """State of the weights of one engine and the names received in the hand-over under way.

    Invariants: only `complete()` makes an engine usable again after `begin()` or `spoil()`; it does so only if every
    required name was received and no unknown one.
    """

    def __init__(self, *, name: str, required: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Start usable, with the weights of the model folder.

        Args:
            name: the engine's, for errors.
            required: parameter names that every hand-over must hold.
            optional: names that it may hold, such as a head tied to the embedding.
        """
        self.name = name
        self._required = frozenset(required)
        self._known = self._required | frozenset(optional)
        self._received: set[str] = set()
        self._unusable: str | None = None
        self.in_progress = False

    def begin(self) -> None:
        """Open a hand-over, also after one that failed."""
        self._received = set()
        self._unusable = "a weight hand-over has begun and not ended well"
        self.in_progress = True

    def receive(self, names: Iterable[str]) -> None:
        """Note what a bucket held. Raises EngineError when no hand-over is open."""
        if not self.in_progress:
            raise EngineError(f"{self.name}: load weights: no hand-over is open (call begin_weights first)")
        self._received.update(names)

    def check_names(self) -> None:
        """Raise EngineError naming what is missing or unknown, or when no hand-over is open."""
        if not self.in_progress:
            raise EngineError(f"{self.name}: end weights: no hand-over is open (call begin_weights first)")
        problems = []
        for kind, names in (
            ("missing", self._required - self._received),
            ("unknown", self._received - self._known),
        ):
            if names:
                problems.append(f"{len(names)} {kind} parameters ({listed(sorted(names))})")
        if problems:
            raise EngineError(
                f"{self.name}: end weights: the hand-over held {' and '.join(problems)}; "
                "the engine does not generate until a complete one"
            )

    def complete(self) -> None:
        """Close the hand-over: the engine is usable."""
        self.in_progress = False
        self._unusable = None

    def spoil(self, reason: str) -> None:
        """Declare the weights unusable until a hand-over ends well."""
        self._unusable = reason

    def require_usable(self) -> None:
        """Raise EngineError if nothing may be generated."""
        if self._unusable is not None:
            raise EngineError(f"{self.name}: generate: refused, since {self._unusable}")
