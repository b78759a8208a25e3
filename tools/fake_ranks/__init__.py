"""One rank of many, none of which is there: what `check_memory_plan.py --fake` runs.

told.py        what depends on values, where tensors have none
watched.py     bytes that live, and what collectives send, phase by phase
rank.py        the first rank of a learner trains one step among ranks that never answer
layouts.py     which models, how they are shared out, and what the plan says of them
links.py       what goes over the links within a host and between hosts
comparison.py  the tables, and the rows of the JSON object
"""
