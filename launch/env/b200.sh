# shellcheck shell=bash
# B200, B300: what any NVIDIA GPU needs.

# shellcheck source=launch/env/nvidia.sh
. "${BASH_SOURCE[0]%/*}/nvidia.sh"
