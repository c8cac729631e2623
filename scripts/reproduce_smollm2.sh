#!/usr/bin/env bash
# A real model made faster on two cores, from nothing: SmolLM2-135M-Instruct, its answers to prompts of three kinds, a
# feature cache, DSpark and DFlash on the same rows, DSpark's heads side by side, then every table and picture. Two to
# three hours; safe to stop and to run again: each stage goes on where it was.
#   bash scripts/reproduce_smollm2.sh                            prompts from the Hugging Face hub
#   bash scripts/reproduce_smollm2.sh math.jsonl code.jsonl magpie    your own, one file a kind; magpie: the target's own
# Environment: PER_KIND prompts of each kind (700), TEST prompts of each kind to measure on (60), ANSWERS a file of
# sampled answers at hand (default: they are sampled here), NEW_TOKENS of an answer (160), STEPS optimiser steps of a
# drafter (3000), HEAD_STEPS of each head that is compared (400), HEADS of DSpark (vanilla gated rnn),
# OUT (runs/smollm2_135m).
set -euo pipefail
wrong() {
    echo "error: $1" >&2
    exit 2
}
# files named by the caller are relative to where the caller is
sources=()
for source in "$@"; do
    if [ "$source" != magpie ]; then
        [ -f "$source" ] || wrong "no file of prompts '$source'; give a JSONL or Parquet file, or magpie"
        source=$(realpath "$source")
    fi
    sources+=("$source")
done
[ -z "${ANSWERS:-}" ] || [ -f "$ANSWERS" ] || wrong "ANSWERS: no file '$ANSWERS'"
answers_at_hand=${ANSWERS:+$(realpath "$ANSWERS")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ${#sources[@]} = 0 ]; then
    sources=(openai/gsm8k:main sahil2801/CodeAlpaca-20k tatsu-lab/alpaca)
elif [ ${#sources[@]} != 3 ]; then
    wrong "three files of prompts are needed (math, code, chat), got ${#sources[@]}"
fi
per_kind=${PER_KIND:-700} test=${TEST:-60} new_tokens=${NEW_TOKENS:-160}
steps=${STEPS:-3000} head_steps=${HEAD_STEPS:-400}
read -ra heads <<< "${HEADS:-vanilla gated rnn}"
out=${OUT:-runs/smollm2_135m}
for name in per_kind test new_tokens steps head_steps; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || wrong "${name^^} must be a whole number >= 1, got '${!name}'"
done
for head in "${heads[@]}"; do
    [[ $head =~ ^(vanilla|gated|rnn)$ ]] || wrong "HEADS are vanilla, gated, rnn or some of them, got '$head'"
done

source scripts/venv.sh
use_env
python=$PYTHON_ENV/bin/python

stage "the target" bash scripts/get_smollm2.sh
cache=$($python -c 'from deepspec.cache import cache_dir; print(cache_dir())')
target=$cache/smollm2-135m-instruct data=$cache/smollm2-135m
mkdir -p "$data"

kinds=(math code chat) train=() held_out=()
for i in 0 1 2; do
    file=$data/${kinds[$i]}.jsonl
    if [ ! -f "$file" ]; then
        if [ "${sources[$i]}" = magpie ]; then
            sources[i]=$data/magpie.jsonl
            stage "the target's own prompts: ${kinds[$i]}" $python -m deepspec.data magpie --target "$target" \
                --number $((per_kind + 2 * test)) --out "${sources[$i]}" --concurrency 64 --max-new-tokens 80
        fi
        # a prompt is held out by its hash, so their number is not exact: a third more than are needed
        stage "prompts: ${kinds[$i]}" $python -m deepspec.data prompts "${sources[$i]}" --out "$file" --exclude none \
            --limit $((per_kind + test)) --hold-out "$($python -c "print(1.35 * $test / ($per_kind + $test))")"
    fi
    train+=("$file")
    held_out+=("${file%.jsonl}.held-out.jsonl")
done

answers() { # answers NAME OPTIONS...
    $python -m deepspec.data answers --target "$target" --prompts "${train[@]}" --out "$data/$1.jsonl" \
        --max-new-tokens "$new_tokens" --concurrency 128 "${@:2}"
}
# As chats are sampled, and as greedy decoding writes: a drafter meets both.
sampled=$answers_at_hand
if [ -z "$sampled" ]; then
    sampled=$data/sampled.jsonl
    stage "answers, temperature 0.7" answers sampled --temperature 0.7
fi
stage "answers, greedy" answers greedy --temperature 0

common=("data.path=('$sampled','$data/greedy.jsonl')" "data.features=$data/features" train.epochs=1000)
stage "features" $python -m deepspec.data features --config config/dspark/smollm2_135m.py --set "${common[@]}" --dtype int8

fit() { # fit NAME CONFIG OVERRIDES...
    $python -m deepspec.train --config "config/$2/smollm2_135m.py" --set "${common[@]}" "out=$out/$1" "${@:3}"
}
stage "train DSpark and DFlash" at_once "$out" dspark fit dspark dspark "train.max_steps=$steps" \
    ++ dflash fit dflash dflash "train.max_steps=$steps"
compared=() commands=()
for head in "${heads[@]}"; do
    commands+=(++ "$head" fit "head-$head" dspark "drafter.markov_head_type=$head" "train.max_steps=$head_steps")
    compared+=("$head=$out/head-$head")
done
stage "train DSpark's heads" at_once "$out" "${commands[@]:1}"

drafters=("dspark=$out/dspark" "dflash=$out/dflash")
measure() { # measure NAME OPTIONS...
    stage "measure: $1" $python -m deepspec.eval --target "$target" --tasks "${held_out[@]}" --resume --out "$out/$1" "${@:2}"
}
measure tau --drafter "${drafters[@]}" --limit "$test" --max-new-tokens 128 --temperature 0 1 \
    --concurrency 32 --equality 0
# Alone, at batch 1: plain and speculative decoding in turns on the same prompts.
measure speed --drafter "${drafters[@]}" --limit $(((test + 14) / 15)) --max-new-tokens 128 \
    --temperature 0 1 --repeats 2 --equality 0
measure eight --drafter "${drafters[@]}" --limit $(((test + 7) / 8)) --max-new-tokens 128 \
    --temperature 0 --concurrency 8 --schedule throughput --equality 0
measure equality --drafter "${drafters[@]}" --dtype float32 --limit 34 --max-new-tokens 200 --concurrency 32
measure heads --drafter "${compared[@]}" --limit $(((test + 2) / 3)) --max-new-tokens 64 \
    --concurrency 32 --equality 0
time_spent
