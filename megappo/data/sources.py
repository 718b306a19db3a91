"""Sources: where rows come from.

A source is a function from a SourceConfig to rows. Of the rows a source holds, `size` first ones are taken and of
these `skip` first ones left out, so that rows `skip` to `size - 1` remain: training with `size: 5500` and validation
with `size: 6000, skip: 5500` never share a row. Rows that cannot be used count, too, so no other row changes its
number when one is mended.

A function from outside (`package.module:function`) may give rows, or mappings of column names to values, of which
rows are made by the columns of the configuration, as of files.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megappo.config.data import BadRow, SourceConfig
from megappo.data.files import datasets, jsonl, parquet
from megappo.data.procedural import reasoning_gym
from megappo.data.records import checked_row, plain, row_of
from megappo.data.types import LeftOut, Row
from megappo.errors import DataError, MegappoError
from megappo.observability.logging import get_logger
from megappo.registry import Registry

logger = get_logger(__name__)

# Any: values of a record.
Source = Callable[[SourceConfig], Iterable[Row | LeftOut | Mapping[str, Any]]]

SOURCES: Registry[Source] = Registry("data source")
SOURCES.register("datasets", datasets)
SOURCES.register("jsonl", jsonl)
SOURCES.register("parquet", parquet)
SOURCES.register("reasoning_gym", reasoning_gym)

_SHOWN = 5
"""Rows that a message names."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SourceRows:
    """What was read."""

    rows: list[Row]
    left_out: list[LeftOut]
    """Rows that cannot be used."""


def read_source(config: SourceConfig, name: str = "") -> SourceRows:
    """Return rows `skip` to `size - 1` of the source, those that can be used and the others.

    Args:
        name: of the source in the configuration; the `source` of rows that bring none.

    Raises:
        DataError: the source cannot be read, gives something that is no row, or has no rows.
        RegistryError: no such kind of source.
    """
    taken = list(islice(_numbered(config), config.size))
    found = taken[config.skip :]
    if not found:
        raise DataError(
            f"data source {config.kind} ({config.place}) has no rows left: "
            f"{len(taken)} rows read (size={config.size}), skip={config.skip} left out (lower skip or give more rows)"
        )
    numbers = Counter(entry.row for entry in found)
    twice = next((number for number, count in numbers.items() if count > 1), None)
    if twice is not None:
        raise DataError(f"data source {config.kind} ({config.place}): gives row {twice} twice (number rows from 0 on)")
    named = name or config.kind
    rows = [entry if entry.source else replace(entry, source=named) for entry in found if isinstance(entry, Row)]
    return SourceRows(rows=rows, left_out=[entry for entry in found if isinstance(entry, LeftOut)])


def read_rows(config: SourceConfig) -> list[Row]:
    """Return the rows of a source that can be used.

    Raises:
        DataError: as `read_source`; a row cannot be used and `on_bad_row` is `refuse`; or none can be used.
    """
    found = read_source(config)
    total = len(found.rows) + len(found.left_out)
    if found.left_out and (config.on_bad_row is BadRow.refuse or not found.rows):
        raise refusal(config, found.left_out, total, remedy=BAD_ROW_REMEDY)
    if found.left_out:
        logger.warning("%s: %s", config.place, f"{len(found.left_out)} rows left out ({reasons(found.left_out)})")
    return found.rows


BAD_ROW_REMEDY = "mend them, or set on_bad_row=filter to leave such rows out"


def refusal(config: SourceConfig, left_out: Sequence[LeftOut], total: int, *, remedy: str) -> DataError:
    """Return the error about rows that cannot be used: how many of `total`, why, and the first few of them."""
    lines = [f"  {entry.message}" for entry in left_out[:_SHOWN]]
    if len(left_out) > _SHOWN:
        lines.append(f"  ... and {len(left_out) - _SHOWN} more")
    head = f"data source {config.kind} ({config.place}): {len(left_out)} of {total} rows cannot be used"
    return DataError("\n".join([f"{head} ({reasons(left_out)}; {remedy}):", *lines]))


def reasons(left_out: Iterable[LeftOut]) -> str:
    """Return the counts by reason, in words."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(entry.reason for entry in left_out).items())


def _numbered(config: SourceConfig) -> Iterator[Row | LeftOut]:
    """Yield what a source gives, records made to rows; it is not asked for more than is taken."""
    place = f"data source {config.kind}"
    for number, entry in enumerate(_given(config)):
        if isinstance(entry, Row):
            yield checked_row(entry, f"{place} row {entry.row}") if ":" in config.kind else entry
        elif isinstance(entry, LeftOut):
            yield entry
        elif isinstance(entry, Mapping):
            yield row_of(config, number, plain(entry), f"{place} record {number}")
        else:
            raise DataError(f"{place}: gave {entry!r:.80} as record {number}, must be a Row or a mapping of columns")


def _given(config: SourceConfig) -> Iterator[Any]:  # Any: a function from outside gives anything
    """Yield what a source gives. Raises DataError where one from outside fails, with the place in its code."""
    source, place = SOURCES.get(config.kind), f"data source {config.kind}"
    try:
        given: Any = source(config)
        if not isinstance(given, Iterable):
            raise DataError(f"{place}: gave {given!r:.80}, must give rows or records (an iterable)")
        yield from given
    except MegappoError:
        raise
    except Exception as error:
        if ":" not in config.kind:
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(f"{place}: raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})") from error
