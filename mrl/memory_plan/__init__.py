"""What a run needs of memory, told before it starts: no weights are read, and none need be there.

- `run_memory`   every process of a plan, and what will not fit, with its cure
- `needs`        what one process needs at its worst moment
- `pass_memory`  what a learner's pass needs, traced without data
- `lone_context` what ranks that share a pass hold of their exchange, traced in one of them
"""
