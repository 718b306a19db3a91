"""`python -m megappo` is `megappo`."""

import sys

from megappo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
