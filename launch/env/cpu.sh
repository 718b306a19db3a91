# shellcheck shell=bash
# No GPU.

# Several processes share the cores; more threads in each make all of them slower.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
