#!/usr/bin/env bash
# A Slurm of two nodes on this machine, for tests: runs a command inside of it and ends it afterwards.
#
#   slurm_cluster.sh FOLDER COMMAND...
#
# Needs root and Slurm: apt-get install -y slurm-wlm munge. Exit code 77: it is not there, and says what is missing.
# Configuration, spool and logs lie in FOLDER; ports are 16817, 17001 and 17002; nothing outside of FOLDER is changed.
set -euo pipefail

folder=$1
shift
for tool in slurmctld slurmd srun sbatch scontrol munged; do
    if ! command -v "$tool" > /dev/null; then
        echo "no Slurm here: $tool is missing (apt-get install -y slurm-wlm munge)" >&2
        exit 77
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "a Slurm of one's own needs root" >&2
    exit 77
fi

started=()
# shellcheck disable=SC2317,SC2329  # called by the trap
stop() {
    local pid
    for pid in "${started[@]}"; do
        kill "$pid" 2> /dev/null || true
    done
    # A daemon whose job does not end would wait for it.
    for _ in $(seq 1 50); do
        kill -0 "${started[@]}" 2> /dev/null || break
        sleep 0.2
    done
    for pid in "${started[@]}"; do
        kill -KILL "$pid" 2> /dev/null || true
    done
    wait
}
trap stop EXIT

mkdir -p "$folder"/{state,n1,n2}
folder=$(cd "$folder" && pwd)
export SLURM_CONF=$folder/slurm.conf
host=$(hostname -s)
cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
# A job that is requeued waits for cred_expire (seconds; 120 otherwise).
AuthInfo=socket=$folder/munge/socket,cred_expire=30
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdSpoolDir=$folder/%n
SlurmdPidFile=$folder/%n.pid
SlurmdLogFile=$folder/%n.log
# Jobs start at once.
SchedulerParameters=batch_sched_delay=0
KillWait=30
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=1
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
CONF

# As root, so that FOLDER may be one that only root can enter. By itself munged refuses folders below /tmp: --force.
install -d -m 0711 "$folder/munge"
(umask 077 && head -c 1024 /dev/urandom > "$folder/munge/key")
munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" 2> "$folder/munged.out" &
started+=($!)
until [ -S "$folder/munge/socket" ]; do
    kill -0 "${started[0]}" 2> /dev/null || { cat "$folder/munged.out" >&2; exit 1; }
    sleep 0.2
done
slurmctld -D > "$folder/slurmctld.out" 2>&1 &
started+=($!)
for node in n1 n2; do
    slurmd -D -N "$node" > "$folder/$node.out" 2>&1 &
    started+=($!)
done
for _ in $(seq 1 150); do
    [ "$(sinfo --noheader --Node --states idle --format %N 2> /dev/null | sort -u | wc -l)" = 2 ] && break
    sleep 0.4
done
if [ "$(sinfo --noheader --Node --states idle --format %N | sort -u | wc -l)" != 2 ]; then
    echo "the two nodes did not come up:" >&2
    tail -n 5 "$folder"/*.out "$folder"/*.log >&2
    exit 1
fi
code=0
"$@" || code=$?
exit "$code"
