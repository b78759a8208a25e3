#!/usr/bin/env bash
# Builds docs/ as a site: build/docs/site/index.html. A broken link, a missing anchor, or a page that docs/index.md does
# not list fails. The builder lives in an environment of its own, build/docs/environment.
#   bash tools/docs.sh            strict
#   bash tools/docs.sh --draft    builds whatever is there, and tells what is wrong
# PYTHON names the interpreter (3.11 or newer), DOCS another folder of pages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
builder="zensical==0.0.73"
environment=build/docs/environment
strict=(--strict)
case "${1:-}" in
    "") ;;
    --draft) strict=() ;;
    *) echo "docs: unknown argument '$1'; wanted --draft or nothing" >&2; exit 2 ;;
esac

if [ "$(cat "$environment/builder" 2>/dev/null)" != "$builder" ]; then
    echo "docs: installing $builder into $environment"
    rm -rf "$environment"
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --no-input "$builder"
    echo "$builder" >"$environment/builder"
fi
"$environment/bin/python" tools/docs_site.py --docs "${DOCS:-docs}" "$@"
NO_COLOR=1 "$environment/bin/zensical" build --clean --config-file build/docs/zensical.toml ${strict[@]+"${strict[@]}"}
echo "docs: build/docs/site/index.html"
