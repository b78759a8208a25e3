#!/usr/bin/env bash
# Lint, format and types. Fails on the first kind of finding.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --dev
.venv/bin/ruff check mrl tests tools
.venv/bin/ruff format --check mrl tests tools
.venv/bin/mypy
