#!/usr/bin/env bash
# Measure the cells of an experiment that need all GPUs of several nodes of a Slurm cluster.
#
#   sbatch --nodes 2 launch/scripts/slurm_nodes.sh FILE [options of the run]
#
# Slurm starts one torchrun on each node, and each torchrun the ranks of its node: 2 nodes with 8 GPUs measure the cells
# with 16 ranks. The folder that this is submitted from must be shared by the nodes, the records in it as well.
#SBATCH --job-name=twinshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"
file=${1:?give the experiment}
shift

export OMP_NUM_THREADS=1
ranks=${SLURM_GPUS_ON_NODE:-1}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port that no other job of the same node takes.
port=$((20000 + SLURM_JOB_ID % 20000))

# --kill-on-bad-exit: when the torchrun of one node ends badly, those of the others end too.
exec srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m launch "$file" "$@"
