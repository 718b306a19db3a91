#!/usr/bin/env bash
# One machine: any command of megappo, with the environment of this machine's GPUs.
#
#   launch/local.sh [--env NAME] [--dry-run] train experiment=quickstart
#
#   --env NAME   environment preset: auto (the default: by nvidia-smi), none, or a name of launch/env/
#   --dry-run    print what would be run
#
# megappo starts Ray by itself. Ctrl-C ends the run, SIGTERM and SIGUSR1 let it save first.
# MEGAPPO_PYTHON names the Python to use (default: .venv/bin/python of this checkout, else python3).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

env=auto
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) print_help "$0"; exit 0 ;;
        --dry-run) dry_run=yes; shift ;;
        --env) env=$(value_of "$@"); shift 2 ;;
        --) shift; break ;;
        -*) die "$1 is no option (--help lists them; those of the command come after it)" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || die "no command given, for example: launch/local.sh train experiment=quickstart"

find_python
load_preset "$env"
run_or_show "$python" -m megappo "$@"
