#!/usr/bin/env bash
# One node of a Slurm job: what launch/slurm.sbatch starts by srun, in the container if there is one.
#
#   slurm_node.sh --env NAME --python PYTHON [options of megappo launch] -- COMMAND...
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
    --help | -h) print_help "$0"; exit 0 ;;
    --dry-run) dry_run=yes; shift ;;
esac
if [ $# -lt 5 ] || [ "$1" != --env ] || [ "$3" != --python ]; then
    die "is started by launch/slurm.sbatch, with --env NAME --python PYTHON ... -- COMMAND"
fi
env=$2 MEGAPPO_PYTHON=$4
shift 4
find_python
load_preset "$env"
run_or_show "$python" -m megappo launch "$@"
