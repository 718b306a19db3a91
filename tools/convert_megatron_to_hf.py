"""The weights of a checkpoint into a Hugging Face folder: `megappo convert megatron-to-hf` with the same options."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
