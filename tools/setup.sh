#!/usr/bin/env bash
# Makes the environment .venv with the pinned packages of constraints.txt. Safe to call again: then it takes no time.
#   bash tools/setup.sh          what runs need
#   bash tools/setup.sh --dev    also what tests and checks need; as root on Debian, SLURM for tests of several hosts
# PYTHON names the interpreter (3.11 or newer); the default is the first suitable one on PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv" stamp="$root/.venv/mrl-setup"

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 2; }

extras="tasks"
case "${1:-}" in
    "") ;;
    --dev) extras="tasks,dev" ;;
    *) die "unknown argument '$1'; wanted --dev or nothing" ;;
esac

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_new_enough "$candidate"; then command -v "$candidate"; return; fi
    done
    die "no Python >= 3.11 found (looked for ${PYTHON:-python3 python3.13 python3.12 python3.11}); install one, or name it: PYTHON=/path/to/python3.11 bash tools/setup.sh"
}

hash_of() { "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

stamped() { sed -n "$1p" "$stamp" 2>/dev/null || true; }  # lines: interpreter and place, packages, extras

is_made() {
    [ -x "$venv/bin/mrl" ] && [ "$(stamped 1)" = "$place" ] && [ "$(stamped 2)" = "$packages" ] &&
        { [ "$extras" = tasks ] || [ "$(stamped 3)" = "$extras" ]; }
}

install_torch() {  # without an NVIDIA GPU the CPU build spares gigabytes; PyPI has only the CUDA build for Linux
    local index="https://download.pytorch.org/whl/cpu"
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null &&
        "$venv/bin/python" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=4)" 2>/dev/null; then
        install --no-deps --index-url "$index" torch  # alone: no other package may come from this index
    fi
}

progress() {  # seconds so far, and what pip does: on a terminal a line that changes, else a line every 15 s
    if [ -t 1 ]; then
        printf '\r\033[Ksetup: %s' "$(echo "$1 s, $2" | cut -c 1-70)"
    elif [ $(($1 % 15)) -eq 0 ]; then
        say "$1 s, $2"
    fi
}

install() {  # its progress while pip works, its whole output only when it fails
    local log="$venv/setup.log" start=$SECONDS pip doing
    # What packages are built with is pinned too: up to pip 25.2 by the first variable, later by the second.
    (cd "$root" && PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        exec "$venv/bin/python" -m pip install --no-input --progress-bar off -c constraints.txt "$@") >"$log" 2>&1 &
    pip=$!
    trap 'kill "$pip" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pip" 2>/dev/null; do
        sleep 1
        doing=$(tail -n 1 "$log" | sed 's/^ *//' | cut -c 1-100)
        case "$doing" in  # the last that pip says for a minute, while it writes
            "Installing collected packages"* | *uninstall*) doing="writing packages into .venv" ;;
        esac
        progress $((SECONDS - start)) "$doing"
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    trap - INT TERM
    if ! wait "$pip"; then
        tail -n 20 "$log" >&2
        die "pip failed; its whole output: $log"
    fi
}

system_packages() {  # what tests of several hosts need and pip has not; without root or apt-get these tests skip
    [ "$extras" = "tasks,dev" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 0
    local missing=() log="$venv/apt.log"
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null || missing+=(slurm-wlm)
    command -v munged >/dev/null || missing+=(munge)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v nft >/dev/null || missing+=(nftables)
    [ "${#missing[@]}" -gt 0 ] && [ ! -e "$log" ] || return 0  # asked once, not at every call
    say "installing ${missing[*]} for tests of several hosts and lost packets"
    if ! DEBIAN_FRONTEND=noninteractive timeout 300 sh -c \
        "apt-get -qq update && apt-get -qq install -y --no-install-recommends ${missing[*]}" >"$log" 2>&1; then
        say "apt-get failed ($log); these tests will skip"
    fi
}

python=$(find_python) || exit 2
place=$({ "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; echo "$root"; } | hash_of)
packages=$(cat "$root/pyproject.toml" "$root/constraints.txt" | hash_of)
if is_made; then
    system_packages
    exit 0
fi

if command -v flock >/dev/null; then  # two calls at once: the second waits, then finds it made
    exec 9>"$root/.venv.lock"
    flock 9
    if is_made; then
        system_packages
        exit 0
    fi
fi
[ ! -L "$venv" ] || die "$venv is a link to $(readlink "$venv"), an environment of another folder, which would be emptied; remove the link"
if [ "$(stamped 3)" = "tasks,dev" ]; then extras="tasks,dev"; fi
if [ "$(stamped 1)" != "$place" ]; then  # scripts in an environment hold its path: another place makes it anew
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || die "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
fi
rm -f "$stamp"
say "installing mrl[$extras] with pinned packages (about 1.5 GB on disk, a few minutes the first time)"
install_torch
install -e "$root[$extras]"
printf '%s\n%s\n%s\n' "$place" "$packages" "$extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
system_packages
say "done in $SECONDS s"
