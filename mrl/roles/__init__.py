"""Roles: one file per process. Each opens with what it owns, speaks, waits for, and what happens if it dies.

`engines` builds the engine that a policy's table names. `wiring` holds what every role does at its outer edge: signals,
logs, telemetry, exit codes.
"""
