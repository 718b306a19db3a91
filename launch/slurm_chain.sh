#!/usr/bin/env bash
# Several Slurm jobs in a row, each going on where the one before ended: for queues that do not let a job requeue itself.
#
#   launch/slurm_chain.sh [--dry-run] COUNT [options of sbatch] -- launch/slurm.sbatch [OPTIONS] train experiment=mine ...
#
# A job waits for the one before to fail, by its time limit for one; when a job completes the run, the rest of the chain
# is cancelled by Slurm. Jobs of a chain do not requeue themselves (--max-requeues 0).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
    --help | -h) print_help "$0"; exit 0 ;;
    --dry-run) dry_run=yes; shift ;;
esac
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || die "how many jobs? for example: launch/slurm_chain.sh 4 --nodes 2 -- launch/slurm.sbatch train ..."
count=$1
shift
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
if [ $# -lt 3 ]; then
    die "no job script given after --, for example: -- launch/slurm.sbatch train experiment=mine"
fi
script=$2
shift 2
[ "$dry_run" = yes ] || command -v sbatch > /dev/null || die "there is no sbatch on $(hostname): run this where jobs are submitted"

before=''
for ((number = 1; number <= count; number++)); do
    job=(sbatch --parsable "${options[@]}")
    [ -z "$before" ] || job+=("--dependency=afternotok:$before" --kill-on-invalid-dep=yes)
    job+=("$script" --max-requeues 0 "$@")
    if [ "$dry_run" = yes ]; then
        show "${job[@]}"
        before=JOB_$number
    else
        before=$("${job[@]}")
        before=${before%%;*}
        echo "job $number of $count: $before"
    fi
done
