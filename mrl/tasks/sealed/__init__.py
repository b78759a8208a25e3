"""Running what a policy wrote: one fresh, sealed process per answer.

- `sealing`          which answers of which tasks are sealed, and the host that cannot
- `sealed_verifier`  the process that forks one for each answer, and never sees it run
- `sealed_child`     one piece of work in such a process, heard once
- `seal`             what closes a process up
- `system_calls`     what it may still ask of the kernel
"""
