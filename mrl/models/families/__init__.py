"""Families of models whose turns and tool calls the package `renderers` knows, beside what chat templates tell."""
