#!/usr/bin/env bash
# A run on a Ray cluster that is running already, submitted as a Ray job.
#
#   launch/ray_job.sh --address http://HEAD:8265 [OPTIONS] train experiment=mine
#
#   --address URL     the cluster's dashboard (default: RAY_API_SERVER_ADDRESS)
#   --home DIR        the checkout of megappo on the cluster's nodes: the run's working folder (default: this one)
#   --python PYTHON   the Python there (default: .venv/bin/python of that checkout)
#   --no-wait         do not follow the output
#   --dry-run         print what would be run
#
# Nothing is copied to the cluster: megappo, models and data must be on its nodes, under the same paths. The cluster must
# be started with the environment of its GPUs (launch/env/). Where it asks for a key, RAY_AUTH_TOKEN must be set here.
# `ray job stop` gives a run 3 s; a cluster whose head was started with RAY_JOB_STOP_WAIT_TIME_S=120 lets it save first.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

address=${RAY_API_SERVER_ADDRESS:-} home=$(cd "$launch_dir/.." && pwd) there='' follow=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) print_help "$0"; exit 0 ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --no-wait) follow=(--no-wait); shift; continue ;;
        --address) address=$(value_of "$@") ;;
        --home) home=$(value_of "$@") ;;
        --python) there=$(value_of "$@") ;;
        --) shift; break ;;
        -*) die "$1 is no option (--help lists them; those of the command come after it)" ;;
        *) break ;;
    esac
    shift 2
done
[ -n "$address" ] || die "no cluster given: --address http://HEAD:8265 (start one with \`ray start --head\`; on one machine launch/local.sh needs none)"
[ $# -gt 0 ] || die "no command given, for example: ... train experiment=mine"
there=${there:-$home/.venv/bin/python}

find_python
# The shell on the head node puts the run into its folder: a working_dir would be copied.
# shellcheck disable=SC2016  # expanded there
run_or_show "$python" -c 'from ray.scripts.scripts import main; main()' job submit --address "$address" "${follow[@]}" \
    -- bash -c 'cd "$1" && shift && exec "$@"' megappo "$home" "$there" -m megappo "$@" cluster.address=auto
