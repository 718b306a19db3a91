"""Sources: where rows come from.

A source is a function from a SourceConfig to rows. Of the rows a source holds, `size` first ones are taken and of
these `skip` first ones left out, so that rows `skip` to `size - 1` remain: training with `size: 5500` and validation
with `size: 6000, skip: 5500` never share a row.
"""

from collections.abc import Callable, Iterable, Iterator

from megappo.config.data import SourceConfig
from megappo.data.files import jsonl, parquet
from megappo.data.procedural import reasoning_gym
from megappo.data.types import Row
from megappo.errors import DataError
from megappo.registry import Registry

SOURCES: Registry[Callable[[SourceConfig], Iterable[Row]]] = Registry("data source")
SOURCES.register("jsonl", jsonl)
SOURCES.register("parquet", parquet)
SOURCES.register("reasoning_gym", reasoning_gym)


def read_rows(config: SourceConfig) -> list[Row]:
    """Return rows `skip` to `size - 1` of the source.

    Raises:
        DataError: the source cannot be read or no row remains; names the source and the numbers.
        RegistryError: no such kind of source.
    """
    taken = list(_first(SOURCES.get(config.kind)(config), config.size))
    rows = taken[config.skip :]
    if not rows:
        raise DataError(
            f"data source {config.kind} ({config.path or config.task}) has no rows left: "
            f"{len(taken)} rows read (size={config.size}), skip={config.skip} left out (lower skip or give more rows)"
        )
    return rows


def _first(rows: Iterable[Row], size: int | None) -> Iterator[Row]:
    """Yield the first `size` rows without asking the source for one more."""
    for count, row in enumerate(rows, start=1):
        yield row
        if count == size:
            return
