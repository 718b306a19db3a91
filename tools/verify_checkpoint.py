"""Whether a checkpoint is as it was written, or is a Hugging Face folder: `megappo convert verify`, same options."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
