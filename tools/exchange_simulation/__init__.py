"""Parts of `tools/simulate_exchange.py`.

- `events`      simulated time: what happens when
- `station`     a daemon: the real core behind a modelled processor, disk and network
- `crowd`       policies with real clients, which publish and ask; forwarders between sites
- `trial`       one setting simulated, and what came out
- `settings`    what is simulated
- `picture`     the outcomes as a figure
"""
