"""A checkpoint rewritten for another layout: `megappo convert reshard` with the same options."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "reshard", *sys.argv[1:]]))
