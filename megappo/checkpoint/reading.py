"""Files of checkpoints and records taken apart: whatever is wrong with one is an error that names it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from megappo.errors import CheckpointError, MegappoError


@contextmanager
def readable(path: Path, error: type[MegappoError] = CheckpointError) -> Iterator[None]:
    """Turn what goes wrong while a file is read and taken apart into an error that names the file.

    Parsers of others (zip, pickle, YAML, JSON that nests too deep) and the constructors behind them raise all kinds of
    errors on bytes that are no such file.
    """
    try:
        yield
    except (error, CheckpointError):
        raise
    except Exception as cause:  # a foreign library, on bytes of unknown origin
        reason = f"{type(cause).__name__}: {cause}"
        remedy = "it is damaged, or of another version of megappo: copy it again, or take another one"
        raise error(f"{path} cannot be read: {reason} ({remedy})") from cause


def read_object(path: Path, error: type[MegappoError] = CheckpointError) -> dict[str, Any]:  # Any: JSON
    """Return the JSON object in a file. Raises `error`."""
    with readable(path, error):
        content: object = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds no JSON object, but {type(content).__name__}")
        return cast(dict[str, Any], content)


def read_arrays(path: Path, error: type[MegappoError] = CheckpointError) -> dict[str, np.ndarray]:
    """Return the arrays in an .npz file. Raises `error`."""
    with readable(path, error), np.load(path, allow_pickle=False) as arrays:
        return {name: cast(np.ndarray, arrays[name]) for name in arrays.files}
