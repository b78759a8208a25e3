"""Command line: one module per command or group, with `add_arguments(parser)` and `run(arguments) -> exit code`.

Only the module of the given command is imported, so that a command starts without torch unless it needs torch. A
user's mistake becomes one line `mrl: error: ...` on stderr and exit code 2.
"""
