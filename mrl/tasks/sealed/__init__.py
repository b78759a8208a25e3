"""Running code that a policy wrote: one fresh, sealed process per answer.

- `sealing`          the tasks whose answers are sealed, and hosts that cannot seal
- `sealed_verifier`  the process that forks one process per answer, and never runs an answer itself
- `sealed_child`     one piece of work in such a process, with one bounded reply
- `seal`             the closing of a process
- `system_calls`     the system calls left to a sealed process
"""
