"""`python -m lantern` is the command `lantern`."""

import sys

from lantern.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
