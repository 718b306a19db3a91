#!/usr/bin/env bash
# Makes .venv and installs the tested CPU set into it, step by step. A step that is done is not done again unless its
# requirements file, a file before it, or the Python version changes.
#
# usage: requirements/install.sh [dev | trainer]     (dev: test tools, too; trainer: test tools, and no engine)
# environment: PYTHON (default python3), TORCH_INDEX_URL (index for the torch step only), VENV (default .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
log=$venv/install.log
stamps=$venv/installed
steps=(torch cpu sglang-cpu sglang-cpu-nodeps megappo)
case ${1:-} in
    dev) steps+=(dev) ;;
    trainer) steps=(torch cpu megappo dev) ;;
esac

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

check_tools() {
    local tool
    command -v "$python" > /dev/null || fail "no $python on PATH (install Python 3.11 or newer, or name one: make PYTHON=python3.12 ...)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) at $(command -v "$python") is too old: 3.11 or newer is needed (name one: make PYTHON=python3.12 ...)"
    "$python" -c 'import ensurepip, venv' 2> /dev/null ||
        fail "$(command -v "$python") cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
    for tool in gcc make; do
        command -v "$tool" > /dev/null ||
            fail "no $tool on PATH: some packages are compiled (on Debian and Ubuntu: apt install build-essential)"
    done
}

# The installed state that a step asks for, in words that change when the step must run again.
state_of() {
    case $1 in
        megappo) cat setup.py pyproject.toml ;;
        *) cat "requirements/$1.txt" ;;
    esac
}

run_step() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input)
    case $1 in
        torch) "${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r requirements/torch.txt ;;
        sglang-cpu-nodeps) "${pip[@]}" --no-deps -r requirements/sglang-cpu-nodeps.txt ;;
        megappo) "${pip[@]}" --no-deps --editable . ;;
        *) "${pip[@]}" -r "requirements/$1.txt" ;;
    esac
}

explain_failure() {
    {
        echo "install: step '$1' failed; the last lines of $log:"
        tail -n 20 "$log" | sed 's/^/  | /'
        if grep -qiE 'No space left on device' "$log"; then
            echo "install: the disk is full (about 3 GB are needed)"
        elif grep -qiE 'NewConnectionError|ReadTimeout|ConnectionResetError|Temporary failure in name resolution|No matching distribution' "$log"; then
            echo "install: the package index could not be reached, or does not have this release for $("$venv/bin/python" --version)"
        fi
        echo "install: mend it and run make again; finished steps are kept"
    } >&2
}

check_tools
if ! "$venv/bin/python" -c '' 2> /dev/null; then
    echo "install: making $venv with $("$python" --version) ($(command -v "$python"))"
    "$python" -m venv "$venv"
fi
mkdir -p "$stamps"

before=$("$venv/bin/python" --version)
number=0
for step in "${steps[@]}"; do
    number=$((number + 1))
    # The hash of a step covers all steps before it, since a later step may have to follow an earlier one.
    before=$({ echo "$before"; state_of "$step"; } | sha256sum | cut -d ' ' -f 1)
    [ "$(cat "$stamps/$step" 2> /dev/null)" = "$before" ] && continue
    SECONDS=0
    echo "install: step $number of ${#steps[@]}, $step ..."
    if ! run_step "$step" > "$log" 2>&1; then
        explain_failure "$step"
        exit 1
    fi
    echo "$before" > "$stamps/$step"
    echo "install: step $number of ${#steps[@]}, $step: done in $SECONDS s"
done
