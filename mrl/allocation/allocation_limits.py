"""Fixed bounds and time constants of the allocation, in one table.

Numbers that a run may choose stand elsewhere: times of the decision in `objective.Rule`, bounds of leases in the table
`allocation` of the configuration.
"""

EPOCHS_PER_LIFE = 2**32
"""Epochs of unit leases that one life of the allocator may use."""
MAX_TOLD_EPOCH = 2**40
"""Epochs that a worker tells are cut to this: more than any run reaches, and far less than a message can hold."""

TIME_CONSTANT_S = 60.0
"""Time constant of the rates of slots, in busy seconds."""
YIELD_CONSTANT_S = 180.0
"""Time constant of the share of groups that were trained on, in busy seconds."""
MIN_BUSY_S = 1.0
"""Least evidence of a learner's rate where slots are leased, in busy seconds."""
MIN_TYPE_S = 5.0
"""Busy seconds of one engine from which a type of unit counts as measured, where there are several types."""
SUPPLY_INTERVAL_S = 5.0
"""Least seconds of an interval of supply: workers count tokens when a group is complete, so that over shorter times
supply is all or nothing."""
LINE_SAMPLE_S = 5.0
"""Least seconds of one point of the latency line: an engine's own count of tokens may be a second old."""
IDLE_INTERVAL_S = 10.0
"""Least seconds over which an idle share is measured: engines tell their totals about once a second."""
MIN_TRAINED_SHARE = 0.3
"""A policy's share of trained groups counts as no less than this."""

MIN_DEMAND_UNITS = 0.05
"""A smaller demand weighs as much as this one in the objective."""
MAX_DEMAND_UNITS = 1e6
"""A larger demand counts as this one: an engine that stood still for long has a speed of next to nothing."""
MIN_DEMAND_REPLICAS = 0.05
"""A smaller demand counts as this one, so that the price of its one replica stays below what the replica feeds."""
START_PROGRESS = 0.5
"""Progress of a policy of which nothing is known yet."""
LEAST_GAIN = 1e-12
"""An exchange of the typed search has to gain more than this."""

PERIODS_PER_DWELL = 4
"""Periods that a dwell of units lasts at least."""
DWELLS_PER_WINDOW = 8
"""Time constant of the progress of units, in dwells."""
NEWEST_SWITCH_WEIGHT = 0.3
"""Weight of the newest switch among the measured times of a policy's switches."""
