# shellcheck shell=bash
# H200: what any NVIDIA GPU needs.

# shellcheck source=launch/env/nvidia.sh
. "${BASH_SOURCE[0]%/*}/nvidia.sh"
