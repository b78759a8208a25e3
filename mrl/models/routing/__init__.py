"""Routing of tokens to the experts of a mixture: recorded where an engine samples, replayed where a learner trains.

- `routers`        the routers of a model, and how many experts there are
- `router_record`  the experts that they chose in the last pass
- `router_replay`  passes in which the experts are given
"""
