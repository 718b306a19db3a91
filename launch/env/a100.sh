# shellcheck shell=bash
# A100, A800: what any NVIDIA GPU needs.

# shellcheck source=launch/env/nvidia.sh
. "${BASH_SOURCE[0]%/*}/nvidia.sh"
