"""Evaluations outside of runs, `mrl eval`: whose answers (`subjects`), how they are had (`measuring`), what is kept of
them (`kept_evaluations`).
"""
