"""The exchange daemon of a drill: `python -m exchange_drill.serve RUN SETTINGS`.

Prints "drill: opening" before it opens its file, and "drill: serving RECORDS" when it listens. Settings (JSON): those
of `Limits`, `host`, and `data_bytes`, the hard limit of its memory (0: none).
"""

import json
import resource
import sys
import time
from pathlib import Path

from mrl.exchange.daemon import ExchangeDaemon
from mrl.exchange.limits import Limits
from mrl.transport.keys import load_keys

ROUND_S = 0.2


def main() -> None:
    run, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    host, data_bytes = settings.pop("host"), settings.pop("data_bytes")
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("drill: opening", flush=True)
    daemon = ExchangeDaemon(
        run / "exchange",
        run / "endpoints",
        load_keys(run / "keys"),
        host=host,
        port=0,
        limits=Limits(**settings),
        clock=time.monotonic,
    )
    print(f"drill: serving {len(daemon.core.index)}", flush=True)
    while True:
        daemon.round(ROUND_S)


if __name__ == "__main__":
    main()
