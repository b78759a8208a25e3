"""Configuration: TOML files and dotted overrides become one frozen, validated `RunConfig`.

`schema` holds the typed tables. `load` reads files and overrides, and turns every mistake into one clear line.
"""
