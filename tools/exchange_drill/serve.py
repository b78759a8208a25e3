"""The exchange daemon as its role runs it: `python -m exchange_drill.serve RUN SETTINGS`.

Says "drill: opening" before it reads its log, and "drill: serving RECORDS CUT_BYTES" when it listens.
Settings (JSON): those of `Limits`, `host`, and `data_bytes`, the hard limit of its memory (0: none).
"""

import json
import resource
import sys
import time
from pathlib import Path

from mrl.exchange.daemon import ExchangeDaemon, Limits
from mrl.roles.exchange_memory import compact_heap
from mrl.transport.keys import load_keys

ROUND_S = 0.2


def main() -> None:
    run, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    host, data_bytes = settings.pop("host"), settings.pop("data_bytes")
    compact_heap()
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
    print(f"drill: serving {len(daemon.core.shelf)} {daemon.log.cut_bytes}", flush=True)
    while True:
        daemon.round(ROUND_S)


if __name__ == "__main__":
    main()
