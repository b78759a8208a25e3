"""Shows what an exchange holds, to whoever looks into a run: the command `mrl inspect`."""

import sys

from mrl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["inspect", *sys.argv[1:]]))
