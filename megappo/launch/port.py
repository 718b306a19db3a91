"""`python -m megappo.launch.port HOST PORT`: whether node 0 can listen there, and if not, who does.

Exit codes: 0 it can, 2 it cannot. For launchers that listen themselves and do not say who has the port. Without
arguments it prints where the processes of this Slurm job can meet: address of its first node, and port.
"""

import os
import sys

from megappo.launch.errors import LaunchError
from megappo.launch.hosts import check_port, expand_hosts, resolve
from megappo.launch.place import slurm_port


def main(arguments: list[str]) -> int:
    """Check the host and port in the arguments; returns the exit code."""
    try:
        if not arguments:
            print(resolve(expand_hosts(os.environ["SLURM_JOB_NODELIST"])[0]), slurm_port(os.environ))
            return 0
        host, port = arguments
        check_port(resolve(host), int(port))
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
