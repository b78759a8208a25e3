"""Modules that run inside an engine's own environment: found there through PYTHONPATH, never imported here."""
