#!/bin/bash
# Train on the nodes of a Slurm job: one torchrun a node, which meet on the first.
#
#     sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh --model ./Llama-3-8B --text FOLDER \
#         --batch-size 64 --sequence-length 4096 --backend inductor --checkpoints /shared/runs/1
#
# What follows is examples/train.py's. Its folders are on a disk that all nodes see. Environment: PROCESSES a node
# (default: its GPUs), PORT, RESTARTS, TRAIN (another script).
#SBATCH --job-name galvatron-fx
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive

set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:?give --gpus-per-node, or PROCESSES for CPUs}}
# Restarted ranks would read the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" \
    --max-restarts "${RESTARTS:-3}" "${TRAIN:-examples/train.py}" "$@"
