"""The command line: one file per group of commands, with `add_arguments(parser)` and `run(arguments) -> exit code`.

Only the module of the command that was given is imported, so that a command starts without torch unless it needs it.
A mistake of the person at the keyboard is one line `mrl: error: ...` on stderr and exit code 2.
"""
