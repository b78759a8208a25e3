"""The memory plan of a run, made before the run starts: no weights are read, and none need be there.

- `run_memory`         every process of a plan; the processes that will not fit, with a cure
- `policy_memory` the processes of one policy
- `needs`              the need of one process at its worst moment
- `pass_memory`        the need of a learner's pass, traced without data
- `fake_context_group` the exchange between ranks that share a pass, traced in one of them
- `fitting`            values of keys with which a run fits into its host
"""
