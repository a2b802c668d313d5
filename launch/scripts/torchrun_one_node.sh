#!/usr/bin/env bash
# Measure the cells of an experiment that have as many ranks as are started here, on this machine.
#
#   launch/scripts/torchrun_one_node.sh RANKS [FILE] [options of the run]
#   launch/scripts/torchrun_one_node.sh 4 launch/experiments/articles.toml --backend gloo
#
# `twinshard run FILE` does this for every number of ranks that FILE has, watches over the ranks and goes on after a
# failure. Take this script where something else has to start the ranks.
set -euo pipefail

ranks=${1:?give the number of ranks, then the experiment}
file=${2:-launch/experiments/quick.toml}
shift "$(($# < 2 ? $# : 2))"

# One thread a rank: ranks share the cores, and sums then have one order.
export OMP_NUM_THREADS=1

# --standalone takes a free port by itself, so that several of these can run at once.
exec torchrun --standalone --nproc-per-node "$ranks" -m launch "$file" "$@"
