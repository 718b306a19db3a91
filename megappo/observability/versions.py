"""Which versions computed something: for people who compare two runs, or replay one elsewhere."""

from importlib import metadata
from platform import python_version

from megappo import __version__

VERSIONS_FILE = "versions.json"
"""Where a checkpoint or a record keeps them."""
_PACKAGES = ("torch", "numpy", "megatron-core", "transformers", "sglang", "ray", "transformer-engine")


def package_versions() -> dict[str, str]:
    """Return the versions of Python, of megappo and of what computes, as far as it is installed."""
    found = {"python": python_version(), "megappo": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
