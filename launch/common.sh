# shellcheck shell=bash
# What the scripts of this folder share. Sourced, never run.

dry_run=no
launch_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

# The comment at the top of the calling script is its help.
print_help() {
    awk 'NR > 1 { if (!/^#/) exit; if (/^#SBATCH/) next; sub(/^# ?/, ""); print }' "$1"
}

# The value of an option that needs one.
value_of() {
    if [ $# -lt 2 ] || [ -z "$2" ]; then
        die "$1 needs a value"
    fi
    printf '%s' "$2"
}

# Sets `python`: MEGAPPO_PYTHON, else that of the checkout's .venv, else python3.
find_python() {
    local host
    host=$(hostname)
    python=${MEGAPPO_PYTHON:-}
    if [ -z "$python" ]; then
        python=$launch_dir/../.venv/bin/python
        [ -x "$python" ] || python=python3
    fi
    command -v "$python" > /dev/null ||
        die "node $host has no $python (MEGAPPO_PYTHON names the Python that megappo is installed in, the same path on all nodes)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "node $host: $python is $("$python" --version 2>&1), and 3.11 or newer is needed (MEGAPPO_PYTHON names another)"
    "$python" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("megappo") is None)' ||
        die "node $host: $python has no megappo (install it there: make install, or name another by MEGAPPO_PYTHON)"
}

# Sets the environment of a kind of GPU: a name of env/, `auto` (by nvidia-smi), or `none`.
load_preset() {
    preset=$1
    if [ "$preset" = auto ]; then
        preset=$(detect_preset)
    fi
    [ "$preset" = none ] && return
    [ -f "$launch_dir/env/$preset.sh" ] ||
        die "--env $preset: there is no such preset (use auto, none, or one of: $(cd "$launch_dir/env" && echo *.sh | sed 's/\.sh//g'))"
    # shellcheck source=/dev/null
    . "$launch_dir/env/$preset.sh"
}

detect_preset() {
    local name
    name=$( (nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null || true) | head -n 1)
    case $name in
        '') echo cpu ;;
        *GB200* | *GB300*) echo gb200 ;;
        *B200* | *B300*) echo b200 ;;
        *H200*) echo h200 ;;
        *H100* | *H800*) echo h100 ;;
        *A100* | *A800*) echo a100 ;;
        *) echo nvidia ;;
    esac
}

# Runs a command in place of this script, or shows it.
run_or_show() {
    show "$@"
    [ "$dry_run" = yes ] || exec "$@"
}

# Under --dry-run: prints preset and command as they would be typed.
show() {
    [ "$dry_run" = yes ] || return 0
    [ "${preset:-none}" = none ] || echo "environment: launch/env/$preset.sh"
    printf '%q ' "$@" | sed 's/ $/\n/'
}
