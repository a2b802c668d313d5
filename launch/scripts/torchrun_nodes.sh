#!/usr/bin/env bash
# Measure the cells of an experiment over several nodes: start this on each of them.
#
#   launch/scripts/torchrun_nodes.sh NODES RANKS_PER_NODE HOST:PORT [FILE] [options of the run]
#   launch/scripts/torchrun_nodes.sh 2 8 node0:29500 launch/experiments/articles.toml     (on both nodes)
#
# HOST is one of the nodes, PORT a free one there. Every node needs the same checkout and environment; the output folder
# (--output) must be one that all nodes see, because rank 0 writes the records and the others their failures.
set -euo pipefail

nodes=${1:?give the number of nodes, the ranks on each, and HOST:PORT}
ranks=${2:?give the number of ranks on each node}
endpoint=${3:?give HOST:PORT of one of the nodes}
file=${4:-launch/experiments/quick.toml}
shift "$(($# < 4 ? $# : 4))"

export OMP_NUM_THREADS=1

# The interface that the nodes reach each other by, where the name of the host leads to another one:
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# The id keeps two runs apart that meet at the same endpoint.
exec torchrun --nnodes "$nodes" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "twinshard-$(basename "$file" .toml)" \
    -m launch "$file" "$@"
