#!/usr/bin/env bash
# Measure a whole experiment on one node of a Slurm cluster.
#
#   sbatch launch/scripts/slurm_one_node.sh [FILE] [options of the run]
#
# Adapt the lines below to the cluster: partition, account, GPUs. Ranks are started by `twinshard run` itself: Slurm needs
# one task only, with as many cores as the largest cell has ranks.
#SBATCH --job-name=twinshard
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
# A minute before the time is up, Slurm tells the job to stop: what was measured stays, and the same sbatch goes on.
#SBATCH --signal=B:TERM@60
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"
file=${1:-launch/experiments/quick.toml}
shift "$(($# < 1 ? $# : 1))"

# In the place of this shell, so that the signal reaches the run.
exec .venv/bin/twinshard run "$file" "$@"
