"""Parts of `tools/bench_exchange.py`: the exchange and the systems that it is compared with.

A broker process stands between a producer process and a consumer process, all on this host. Every record is published
by one policy, stored, and decoded by a consumer of another policy that watches its prompt.

- `loads`           the records that travel, and the check that they arrive
- `part`            protocols of a system's module: a producer, a consumer, and a broker where none is installed
- `process`         a process of the benchmark, as its parent sees it
- `__main__`        a process of the benchmark, as it runs
- `brokers`         starts and ends the broker of each system
- `exchange`        the exchange of mrl, through its client library
- `redis_streams`   Redis Streams, with the lookup by prompt that the same job needs
- `trial`           one round of one system: its rate, its broker's CPU and memory, its acknowledgements
"""
