#!/usr/bin/env bash
# From nothing to a table of plain decoding, DFlash and DSpark, on two cores in about ten minutes:
# install, train the embedded target, let it answer prompts, cache its features, train both drafters, evaluate.
# Safe to run again: each stage goes on where it was, or finds its work done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
# Threads that wait must sleep: with the default, spinning ones take the cores from those that work.
export OMP_WAIT_POLICY=PASSIVE

stage "install" ensure_venv .venv plot
python=.venv/bin/python
stage "the embedded target" $python -m deepspec.tiny
tiny=$($python -c 'from deepspec.tiny import target_dir; print(target_dir())')

answers() { # answers FILE OPTIONS...
    $python -m deepspec.data answers --target deepspec/tiny --prompts "$tiny/prompts_train.jsonl" \
        --out "$tiny/$1" --max-new-tokens 96 --concurrency 64 "${@:2}"
}
stage "answers of the target, temperature 1" answers answers.jsonl --temperature 1
stage "answers of the target, greedy" answers answers_greedy.jsonl --temperature 0 --limit 224
# Both drafters read the same layers on the same rows, several times: the target computes them once.
features=data.features=$tiny/features
stage "features" $python -m deepspec.data features --config config/dspark/tiny.py --set "$features"
train() { # train KIND
    $python -m deepspec.train --config "config/$1/tiny.py" --set "$features"
}
stage "train DFlash and DSpark" at_once runs/tiny DFlash train dflash ++ DSpark train dspark
# One thread: at batch 1 a model this small loses more to waking a second one than it gains.
stage "evaluate" env OMP_NUM_THREADS=1 $python -m deepspec.eval --target deepspec/tiny \
    --drafter runs/tiny/dflash --drafter runs/tiny/dspark --tasks "$tiny/prompts_held_out.jsonl" \
    --limit 64 --max-new-tokens 64 --temperature 0 1 --out runs/tiny/eval --resume

time_spent
