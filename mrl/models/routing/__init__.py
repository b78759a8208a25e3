"""Which experts the tokens of a mixture go to: seen where an engine samples, replayed where a learner trains.

- `routers`        the routers of a model, and how many experts there are
- `router_record`  what they chose in the last pass
- `router_replay`  passes in which they are told what to choose
"""
