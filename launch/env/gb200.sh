# shellcheck shell=bash
# GB200, GB300: NVLink reaches the other trays of a rack.

# NVLink between hosts needs memory of cuMem, so both ends of a weight group have it on (before nvidia.sh).
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-1}
# Fail where the fabric between the trays is not up, instead of taking the network without a word.
export NCCL_MNNVL_ENABLE=${NCCL_MNNVL_ENABLE:-1}
# shellcheck source=launch/env/nvidia.sh
. "${BASH_SOURCE[0]%/*}/nvidia.sh"
