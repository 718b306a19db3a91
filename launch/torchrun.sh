#!/usr/bin/env bash
# Several machines by torchrun: start it on every node, with its own --node-rank.
#
#   launch/torchrun.sh --nodes 2 --node-rank 0 --head-address HOST [--port 29500] train experiment=mine
#
#   --nodes N             how many machines
#   --node-rank R         which of them this is, from 0
#   --head-address HOST   node 0, by a name or address that all can reach
#   --port P              where node 0 listens (default 29500; the same on all nodes)
#   --cpus-per-node N     CPUs that Ray may hand out here (default: those of this machine)
#   --join-s S            longest wait for all nodes (default 300)
#   --ray-s S             longest wait for Ray on all nodes (default 180)
#   --env NAME            environment preset: auto (the default: by nvidia-smi), none, or a name of launch/env/
#   --dry-run             print what would be run
#
# torchrun starts one process per node, `megappo launch`: it checks that the nodes agree, starts Ray on all of them and
# the command on node 0, and all end with its exit code. A signal to any node reaches the command once.
# Benchmarks and conversion need no Ray; torchrun runs them itself (docs/launch.md).
# MEGAPPO_PYTHON names the Python to use (default: .venv/bin/python of this checkout, else python3).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

env=auto nodes='' rank='' head='' port=29500 options=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) print_help "$0"; exit 0 ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --env) env=$(value_of "$@") ;;
        --nodes) nodes=$(value_of "$@") ;;
        --node-rank) rank=$(value_of "$@") ;;
        --head-address) head=$(value_of "$@") ;;
        --port) port=$(value_of "$@") ;;
        --cpus-per-node | --join-s | --ray-s)
            value=$(value_of "$@")
            options+=("$1" "$value")
            ;;
        --) shift; break ;;
        -*) die "$1 is no option (--help lists them; those of the command come after it)" ;;
        *) break ;;
    esac
    shift 2
done
[ -n "$nodes" ] || die "no nodes given: --nodes N --node-rank R --head-address HOST, on every node (one machine: launch/local.sh)"
[ -n "$rank" ] || die "--nodes $nodes needs --node-rank, too: from 0 to $((nodes - 1)), another one on every node"
[ -n "$head" ] || die "--nodes $nodes needs --head-address, too: node 0, by a name or address that all can reach"
[ $# -gt 0 ] || die "no command given, for example: ... train experiment=mine"

find_python
load_preset "$env"
# An older torchrun has no such options: there a signal other than TERM, INT, HUP and QUIT ends it without the run.
patient=()
if "$python" -c 'import importlib.util as u, pathlib, sys
run = pathlib.Path(u.find_spec("torch").submodule_search_locations[0]) / "distributed" / "run.py"
sys.exit("--shutdown-timeout" not in run.read_text() or "--signals-to-handle" not in run.read_text())'; then
    # The run itself ends in time after a signal (checkpoint.on_signal_s); torchrun would kill it after 30 s.
    patient=(--signals-to-handle 'SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2' --shutdown-timeout 3600)
fi
result=$(mktemp)
command=("$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$rank" --nproc-per-node 1
    --master-addr "$head" --master-port "$port" "${patient[@]}"
    -m megappo launch "${options[@]}" --exit-code-file "$result" -- "$@")
if [ "$dry_run" = yes ]; then
    rm -f "$result"
    show "${command[@]//$result/EXIT_CODE_FILE}"
    exit 0
fi
trap 'rm -f "$result"' EXIT
if [ "$rank" = 0 ]; then
    "$python" -m megappo.launch.port "$head" "$port" || exit 2
fi

# A process group of its own (job control): Ctrl-C in the terminal then reaches this script only, which passes it on
# once.
set -m
"${command[@]}" < /dev/null &
torchrun=$!
for name in INT TERM HUP USR1 USR2; do
    # shellcheck disable=SC2064  # the values of now are meant
    trap "kill -$name $torchrun 2> /dev/null || true" "$name"
done
code=0
while true; do
    code=0
    wait "$torchrun" || code=$?
    # A trap interrupts `wait`; it is the end only when torchrun is gone.
    kill -0 "$torchrun" 2> /dev/null || break
done
told=$(cat "$result")
exit "${told:-$code}"
