"""How a dimension is cut over ranks. Torch-free."""


def shard_range(length: int, *, rank: int, size: int) -> range:
    """Return what rank holds of a dimension that is cut into `size` parts of ceil(length / size), the last ones short
    or empty where they do not divide it (a vocabulary; all else is divisible)."""
    part = -(-length // size)
    return range(min(rank * part, length), min((rank + 1) * part, length))
