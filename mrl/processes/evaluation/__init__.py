"""Evaluations outside of runs, and old versions served beside a run.

`mrl eval` measures policies and models (`subjects`) on held-out prompts (`measuring`) and keeps the results in files
(`saved_evaluations`). `checkpoint_serving` is the process that serves a checkpoint through a run's gateway.
"""
