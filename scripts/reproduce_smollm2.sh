#!/usr/bin/env bash
# A real model made faster on two cores, from nothing: SmolLM2-135M-Instruct, its answers to prompts of three kinds, a
# feature cache, DSpark with each head and DFlash on the same rows, then every table and picture. Hours; safe to stop
# and to run again: each stage goes on where it was.
#   bash scripts/reproduce_smollm2.sh                            prompts from the Hugging Face hub
#   bash scripts/reproduce_smollm2.sh math.jsonl code.jsonl chat.jsonl    your own, one file a kind
# Environment: PER_KIND prompts of each kind (700), TEST prompts of each kind to measure on (60), STEPS optimiser steps a
# drafter (2000), HEADS of DSpark (vanilla gated rnn), NEW_TOKENS of an answer (160), OUT (runs/smollm2_135m).
set -euo pipefail
# files named by the caller are relative to where the caller is
sources=()
for file in "$@"; do sources+=("$(realpath "$file")"); done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ${#sources[@]} = 0 ]; then
    sources=(openai/gsm8k:main sahil2801/CodeAlpaca-20k tatsu-lab/alpaca)
elif [ ${#sources[@]} != 3 ]; then
    echo "error: three files of prompts are needed (math, code, chat), got ${#sources[@]}" >&2
    exit 2
fi
per_kind=${PER_KIND:-700} test=${TEST:-60} steps=${STEPS:-2000} new_tokens=${NEW_TOKENS:-160}
read -ra heads <<< "${HEADS:-vanilla gated rnn}"
out=${OUT:-runs/smollm2_135m}

source scripts/venv.sh
use_env
python=$PYTHON_ENV/bin/python

stage() { # stage NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
}

stage "the target" bash scripts/get_smollm2.sh
cache=$($python -c 'from deepspec.cache import cache_dir; print(cache_dir())')
target=$cache/smollm2-135m-instruct data=$cache/smollm2-135m
mkdir -p "$data"

kinds=(math code chat) train=() held_out=()
for i in 0 1 2; do
    file=$data/${kinds[$i]}.jsonl
    # a prompt is held out by its hash, so their number is not exact: a third more than are needed
    if [ ! -f "$file" ]; then
        stage "prompts: ${kinds[$i]}" $python -m deepspec.data prompts "${sources[$i]}" --out "$file" --exclude none \
            --limit $((per_kind + test)) --hold-out "$($python -c "print(1.35 * $test / ($per_kind + $test))")"
    fi
    train+=("$file")
    held_out+=("${file%.jsonl}.held-out.jsonl")
done

answers() { # answers NAME OPTIONS...
    $python -m deepspec.data answers --target "$target" --prompts "${train[@]}" --out "$data/$1.jsonl" \
        --dtype bfloat16 --max-new-tokens "$new_tokens" --concurrency 64 "${@:2}"
}
# As chats are sampled, and as greedy decoding writes: a drafter meets both.
stage "answers, temperature 0.7" answers sampled --temperature 0.7
stage "answers, greedy" answers greedy --temperature 0

common=("data.path=('$data/sampled.jsonl','$data/greedy.jsonl')" "data.features=$data/features" "train.max_steps=$steps" train.epochs=1000)
stage "features" $python -m deepspec.data features --config config/dspark/smollm2_135m.py --set "${common[@]}" --dtype int8

drafters=()
fit() { # fit NAME CONFIG OVERRIDES...
    stage "train $1" $python -m deepspec.train --config "config/$2/smollm2_135m.py" \
        --set "${common[@]}" "out=$out/$1" "${@:3}"
    drafters+=("$1=$out/$1")
}
fit dflash dflash
fit dspark dspark
for head in "${heads[@]}"; do
    [ "$head" = vanilla ] || fit "dspark-$head" dspark "drafter.markov_head_type=$head"
done

measure() { # measure NAME OPTIONS...
    stage "measure: $1" $python -m deepspec.eval --target "$target" --tasks "${held_out[@]}" --resume --out "$out/$1" "${@:2}"
}
measure tau --drafter "${drafters[@]}" --dtype bfloat16 --limit "$test" --max-new-tokens 128 --temperature 0 1 \
    --concurrency 8 --equality 0
measure speed --drafter "${drafters[@]:0:2}" --dtype bfloat16 --limit $(((test + 2) / 3)) --max-new-tokens 128 \
    --temperature 0 1 --repeats 2 --equality 0
measure equality --drafter "${drafters[@]:0:2}" --dtype float32 --limit 34 --max-new-tokens 200 --concurrency 8
stage "picture: acceptance by slot" $python -m deepspec.eval.studies acceptance --drafter "${drafters[@]:0:2}" \
    --target "$target" --tasks "${held_out[@]}" --dtype bfloat16 --limit "$test" --max-new-tokens 128 --concurrency 8 \
    --resume --out "$out/acceptance"
