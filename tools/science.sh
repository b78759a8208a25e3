#!/usr/bin/env bash
# The science programme: regimes tuned with equal budgets and compared on fresh seeds, setting by setting; and doses, in
# which SGT, at both of its strengths, stands beside its control, over the share of rare operations. The same command goes
# on after anything; every run stays in runs/science/SETTING, and the tables are gathered in runs/science/summary.md.
#   bash tools/science.sh                     all settings: about four hours on 2 quiet cores
#   bash tools/science.sh --quick [SETTING...]  a miniature that shows that everything runs, in runs/science-quick
#   bash tools/science.sh SETTING...          staged, overlapping, unequal, families, dose-RARE_SHARE, or tokens
# REGIMES (default independent,sgt, and of doses all four; the first is the baseline), SEEDS (default 4, as --seeds of
# mrl compare) and OUT name others and another folder; `tokens` has rows and seeds of its own.
# `tokens` gives `independent` as many trained tokens as regimes that share (tools/science_tokens.py).
# With doses, doses.md and doses.png say how the gain follows from the chance of a rescue (tools/science_doses.py).
# A setting that fails does not keep the next ones from their turn; it is named at the end, with exit code 1.
# See docs/sharing/comparison.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=tools
quick=""
if [ "${1:-}" = --quick ]; then quick=yes; shift; fi
out=${OUT:-runs/science${quick:+-quick}}
doses=(0.005 0.01 0.02 0.05 0.125)  # with 0.125 each of the eight operations is as likely as the others
settings=(staged overlapping unequal families)
if [ -n "$quick" ]; then doses=(0.01 0.125); fi
for share in "${doses[@]}"; do settings+=("dose-$share"); done
settings+=(tokens)
if [ $# -gt 0 ]; then settings=("$@"); fi

words_of() {  # one word a line: configuration, then overrides
    local config=configs/quickstart.toml
    local budget=(--tune 4 --tune-seeds 1001, --seeds "${SEEDS:-4}" --run.steps 80 --evaluation.every 20) policies=(qwen llama)
    case $1 in
        staged) ;;
        overlapping)  # six operations each, four of them in common, the others not rare
            budget+=(--policies.qwen.make.skilled_in '["reverse","capital","trim","double","count","swap"]')
            budget+=(--policies.llama.make.skilled_in '["count","swap","rotate","front","trim","double"]')
            for name in qwen llama; do budget+=("--policies.$name.make.rare_share" 0.05); done ;;
        unequal)  # a strong policy is skilled in all that a weak one is, and more; the weak one is half as wide
            budget+=(--policies.qwen.make.skilled_in '["reverse","capital","trim","double","count","swap"]')
            budget+=(--policies.llama.make.skilled_in '["count","swap"]' --policies.llama.make.hidden_size 64) ;;
        families) config=configs/three_families.toml policies+=(gemma) ;;
        dose-*)
            if ! [[ ${1#dose-} =~ ^(0?\.[0-9]+|[01]|1\.0*)$ ]]; then
                echo "science: no share of rare operations: $1; wanted dose-X with X from 0 to 1, as dose-0.05" >&2
                return 2
            fi
            # without tuning, at the rate that both independent and sgt chose in the settings above
            budget=(--seeds "${SEEDS:-4}" --run.steps 80 --evaluation.every 20)
            for name in qwen llama; do
                budget+=("--policies.$name.make.rare_share" "${1#dose-}" "--policies.$name.learner.lr" 4e-4)
            done ;;
        tokens) budget=() ;;
        *)
            echo "science: no such setting: $1; wanted staged, overlapping, unequal, families, dose-0.05 or tokens" >&2
            return 2 ;;
    esac
    if [ -n "$quick" ]; then
        if [ "$1" = tokens ]; then
            budget+=(--seeds 1 --steps 2)
        else
            if [[ $1 != dose-* ]]; then budget+=(--tune 2 --tune-seeds 1001,); fi
            budget+=(--seeds 1 --run.steps 2 --evaluation.every 0)
        fi
        budget+=(--pool.train_prompts 64 --pool.held_out_prompts 16)
        for name in "${policies[@]}"; do
            budget+=("--policies.$name.make.hidden_size" 32 "--policies.$name.make.num_layers" 1)
            budget+=("--policies.$name.make.warm_start_steps" 20 "--policies.$name.learner.prompts_per_step" 8)
        done
    fi
    printf '%s\n' "$config" "${budget[@]}"
}

for setting in "${settings[@]}"; do words_of "$setting" >/dev/null; done  # before anything is trained
failed=()
for setting in "${settings[@]}"; do
    mapfile -t words < <(words_of "$setting")
    regimes=independent,sgt
    if [[ $setting = dose-* ]]; then regimes+=,sgt-reported,science_controls:OWN_SUCCESSES; fi
    echo "== $setting"
    command=(-m mrl compare "${words[0]}" --regimes "${REGIMES:-$regimes}" --folder "$out/$setting")
    if [ "$setting" = tokens ]; then command=(tools/science_tokens.py "$out/tokens"); fi
    "$python" "${command[@]}" "${words[@]:1}" || {
        code=$?
        if [ $code -eq 130 ]; then exit 130; fi  # interrupted
        echo "science: $setting failed with exit code $code" >&2
        failed+=("$setting")
    }
    mkdir -p "$out"
    for done in "$out"/*/comparison.md "$out"/tokens/tokens.md; do
        if [ -e "$done" ]; then echo "# $(basename "$(dirname "$done")")"; echo; cat "$done"; echo; fi
    done >"$out/.summary.md"
    mv "$out/.summary.md" "$out/summary.md"
done
if compgen -G "$out/dose-*/comparison.json" >/dev/null; then "$python" tools/science_doses.py "$out" || failed+=(doses); fi
echo "wrote $out/summary.md"
if [ ${#failed[@]} -gt 0 ]; then echo "science: failed: ${failed[*]}" >&2; exit 1; fi
