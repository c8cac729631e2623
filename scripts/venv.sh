# Sourced by the other scripts: the stages of a long one (Ctrl-C ends the script, not its present stage alone), and
# ensure_venv DIR EXTRAS, which makes a virtual environment with this checkout installed in it.
# PYTHON names the interpreter it is made from (default python3).

ensure_venv() {
    local dir=$1 extras=$2 root stamp python=${PYTHON:-python3}
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: Python 3.11 or newer is needed; set PYTHON to one ('$python' is not)" >&2
        return 2
    }
    # What the environment depends on. An editable install also remembers where the checkout is.
    stamp=$("$python" - "$root" "$extras" <<'EOF'
import hashlib, pathlib, sys
root, extras = sys.argv[1:]
text = pathlib.Path(root, "pyproject.toml").read_text() + "\n".join([root, extras, sys.version])
print(hashlib.sha256(text.encode()).hexdigest())
EOF
    )
    if [ "$(cat "$dir/.deepspec-stamp" 2>/dev/null)" = "$stamp" ] && "$dir/bin/python" -c 'import torch, transformers' 2>/dev/null; then
        return
    fi
    echo "Installing into $dir"
    rm -f "$dir/.deepspec-stamp"
    if ! "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$dir" # a half-made environment, or none
        "$python" -m venv "$dir"
    fi
    # torch first, so that a build chosen by hand (CPU, CUDA 12.x, ...) stays and everything else adapts to it.
    "$dir/bin/python" -c 'import torch' 2>/dev/null || "$dir/bin/python" -m pip install -q "torch==2.13.0"
    "$dir/bin/python" -m pip install -q -e "$root[$extras]"
    echo "$stamp" >"$dir/.deepspec-stamp"
}

use_env() { # set $PYTHON_ENV, where nobody has, to .venv, made if it is missing
    export OMP_WAIT_POLICY=PASSIVE
    [ -n "${PYTHON_ENV:-}" ] || ensure_venv .venv plot,gguf
    export PYTHON_ENV=${PYTHON_ENV:-.venv}
}

run_in_env() { # run_in_env SCRIPT ARGS...: one of these scripts in that environment
    use_env
    exec "$PYTHON_ENV/bin/python" "scripts/$1" "${@:2}"
}

stages=()
# A training that is interrupted saves and ends well; its script must not go on to the next stage as if it were done.
trap 'wait; exit 130' INT
stage() { # stage NAME COMMAND...: run it under a heading, say how long it took, and note that in $stages
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
    stages+=("$(printf '%5d s  %s' $((SECONDS - start)) "$name")")
}

at_once() { # at_once DIR NAME COMMAND... [++ NAME COMMAND...]...: all at the same time, each with its part of the cores.
    # A small drafter's step gains little from a second thread, so this takes half of the time of one after another. The
    # last one is seen; what the others write goes to DIR/NAME.log, and is shown where one fails. Fails if any fails.
    local dir=$1 number=1 word i failed=0 names=() pids=() command=()
    shift
    for word in "$@"; do [ "$word" != ++ ] || number=$((number + 1)); done
    local threads=$(($(getconf _NPROCESSORS_ONLN) / number))
    [ "$threads" -ge 1 ] || threads=1
    mkdir -p "$dir"
    for word in "$@"; do
        if [ "$word" != ++ ]; then
            command+=("$word")
            continue
        fi
        echo "${command[0]}: beside the others, see $dir/${command[0]}.log"
        OMP_NUM_THREADS=$threads "${command[@]:1}" >"$dir/${command[0]}.log" 2>&1 &
        names+=("${command[0]}") pids+=($!) command=()
    done
    OMP_NUM_THREADS=$threads "${command[@]:1}" || failed=$?
    for i in "${!pids[@]}"; do
        wait "${pids[i]}" || {
            failed=$?
            echo "error: ${names[i]} failed:" >&2
            tail -n 20 "$dir/${names[i]}.log" >&2
        }
    done
    return "$failed"
}

time_spent() {
    printf '\nTime spent\n'
    printf '%s\n' "${stages[@]}"
    printf '%5d s  in all\n' "$SECONDS"
}
