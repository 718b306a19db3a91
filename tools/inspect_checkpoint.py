"""What is in checkpoints, and whether they are whole: `megappo inspect checkpoint` with the same options."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["inspect", "checkpoint", *sys.argv[1:]]))
