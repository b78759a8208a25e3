#!/usr/bin/env bash
# What the environment .venv is made of, and what is known against it (docs/supply-chain.md).
#   bash tools/supply_chain.sh sbom [FILE]   a CycloneDX list of what is installed; by default sbom.cdx.json
#   bash tools/supply_chain.sh audit [FILE]  known vulnerabilities of what a file pins; by default constraints.txt
#   bash tools/supply_chain.sh lock [FILE]   what pip would install here, with hashes; by default requirements.lock
# Exit codes of audit: 0 nothing is known, 1 something is, 3 nobody could be asked, so that nothing is known either way.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools="$root/.venv/supply-chain" pins=(cyclonedx-bom==7.5.0 pip-audit==2.10.1)

die() { echo "supply chain: $*" >&2; exit 2; }

tool() {  # of an environment of its own: what looks at packages must not change them
    if [ "$(cat "$tools/pins" 2>/dev/null)" != "${pins[*]}" ]; then
        "$root/.venv/bin/python" -m venv --clear "$tools"
        "$tools/bin/python" -m pip install -q --no-input "${pins[@]}"
        echo "${pins[*]}" >"$tools/pins"
    fi
    "$tools/bin/$1" "${@:2}"
}

sbom() {
    tool cyclonedx-py environment --pyproject "$root/pyproject.toml" --mc-type application --output-reproducible \
        --output-format JSON --output-file "$1" "$root/.venv/bin/python"
    echo "supply chain: $1 lists $(grep -c '"bom-ref"' "$1") components"
}

audit() {
    local found="$tools/audit.json" code=0
    rm -f "$found"
    tool pip-audit --disable-pip --no-deps -r "$1" --progress-spinner off --format json --output "$found" || code=$?
    if [ ! -s "$found" ]; then
        echo "supply chain: not audited: the database of vulnerabilities could not be asked" >&2
        exit 3
    fi
    "$root/.venv/bin/python" - "$found" <<'PYTHON' || exit 3
import json, sys
packages = json.load(open(sys.argv[1]))["dependencies"]
for one in packages:
    if "skip_reason" in one:
        print(f"{one['name']}: not audited: {one['skip_reason']}")
    for known in one.get("vulns", []):
        print(f"{one['name']} {one['version']}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'no version'}")
audited = [one for one in packages if "skip_reason" not in one]  # a mirror of the index may have no such database
print(f"supply chain: {len(audited)} of {len(packages)} packages audited,", end=" ")
print(f"{sum(len(one.get('vulns', [])) for one in packages)} findings")
sys.exit(not audited)
PYTHON
    exit "$code"
}

lock() {
    local report
    report=$(mktemp)
    trap "rm -f '$report'" EXIT
    (cd "$root" && .venv/bin/python -m pip install -q --dry-run --ignore-installed --report "$report" \
        -c constraints.txt -e "$root[tasks,dev]")
    "$root/.venv/bin/python" - "$report" >"$1" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
where = report["environment"]
print(f"# What pip {report['pip_version']} takes for mrl[tasks,dev] with constraints.txt, on {where['sys_platform']},")
print(f"# {where['platform_machine']}, Python {where['python_version']}, without a GPU. Made by tools/supply_chain.sh lock.")
for one in sorted(report["install"], key=lambda one: one["metadata"]["name"].lower()):
    metadata, hashes = one["metadata"], one["download_info"].get("archive_info", {}).get("hashes", {})
    if hashes:  # else it is mrl itself
        print(f"{metadata['name']}=={metadata['version'].partition('+')[0]} --hash=sha256:{hashes['sha256']}")
PYTHON
    echo "supply chain: $1 pins $(grep -c -- --hash "$1") packages"
}

[ -x "$root/.venv/bin/python" ] || die "there is no .venv; make it with: bash tools/setup.sh"
case "${1:-}" in
    sbom) sbom "${2:-$root/sbom.cdx.json}" ;;
    audit) audit "${2:-$root/constraints.txt}" ;;
    lock) lock "${2:-$root/requirements.lock}" ;;
    *) die "wanted sbom, audit or lock, got '${1:-}'" ;;
esac
