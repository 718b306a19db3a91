"""A Hugging Face folder into the weights of a checkpoint: `megappo convert hf-to-megatron` with the same options."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
