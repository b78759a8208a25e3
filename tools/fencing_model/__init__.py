"""Exhaustive checks of unit leases: every order of messages, losses, doublings, stops, deaths and restarts.

`world` is one unit, two policies and all failures around the real allocator core and the real node guard; `designs`
drops one rule at a time; `search` visits every state.
"""
