#!/usr/bin/env bash
# `mrl engine-env` of the environment that tools/setup.sh makes: see `mrl engine-env --help`.
exec "$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/mrl" engine-env "$@"
