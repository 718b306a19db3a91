"""What is wrong with a launch."""

from megappo.errors import MegappoError


class LaunchError(MegappoError):
    """The nodes cannot become one run; names the node, what is wrong with it and the remedy."""

    exit_code = 2


class NodeLostError(MegappoError):
    """A node that took part is gone; names it."""
