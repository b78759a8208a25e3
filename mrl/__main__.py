"""`python -m mrl`: the same as the command `mrl`."""

import sys

from mrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
