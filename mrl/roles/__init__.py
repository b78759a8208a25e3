"""Roles: one file per process. Each opens with what it owns, speaks, waits for, and what happens if it dies.

`wiring` holds what every role does at its outer edge: signals, logs, telemetry, exit codes.
"""
