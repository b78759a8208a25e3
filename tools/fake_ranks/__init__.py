"""Parts of `check_memory_plan.py --fake`: one rank of a learner, among other ranks that do not exist.

told.py answers to operations that depend on values, where tensors have none watched.py bytes that live, and bytes that
collectives send, phase by phase rank.py the first rank of a learner trains one step among ranks that never answer
layouts.py models, how they are sharded, and the memory plan of a rank links.py bytes over the links within a host and
between hosts comparison.py the tables, and the rows of the JSON object
"""
