"""`python -m asyncrl` is the `asyncrl` command; the supervisor starts its children this way."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
