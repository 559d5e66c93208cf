#!/bin/bash
# Train on the nodes of a SLURM job:  sbatch deploy/slurm.sh run.yaml [key=value ...]
#
# Every node starts Ray, dovetail runs on the first, and Ray is stopped at the end. With trainer.save_freq set, submitting the
# same line again continues from the newest checkpoint. The repository, the environment and the run folder must be on a file
# system that all nodes see. Needs Ray 2.52 or newer.
#SBATCH --job-name=dovetail
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

source "${DOVETAIL_VENV:-.venv}/bin/activate"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}   # not with head: under pipefail the job ends when head leaves before scontrol has written all
# What was asked for: an exclusive job counts all GPUs of a node in SLURM_GPUS_ON_NODE, but its steps see those asked for.
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
gpus=${gpus##*:}   # "h100:8" has a type before the number

# Ray gets a number: its resolver asks a name server for names that only /etc/hosts has, and Debian gives a host's own name
# 127.0.1.1 there. This script runs on the first node.
address=$(getent ahostsv4 "$first" | awk '$1 !~ /^127\./ && !found++ {print $1}') || true
[[ $address ]] || address=$(hostname -I | awk '{print $1}')

export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300   # seconds for all nodes to join
ray get-auth-token --generate > /dev/null           # ~/.ray/auth_token, in a home folder that all nodes share

# srun returns the highest code of all tasks: 143 of those that it ends, whatever the run's own was. A task that is asked to end
# (scancel, the time limit) waits for the run, which saves a checkpoint.
own=$(mktemp)
trap 'rm -f "$own"' EXIT
code=0
srun --kill-on-bad-exit=1 \
  ray symmetric-run --address "$address:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-gpus "$gpus" -- \
  bash -c 'trap : TERM; "${@:2}"; code=$?; echo $code > "$1"; exit $code' run "$own" \
  dovetail train "$@" ray_init.address=auto trainer.device=cuda \
  trainer.nnodes="$SLURM_JOB_NUM_NODES" trainer.n_gpus_per_node="$gpus" || code=$?
[[ -s $own ]] && code=$(< "$own")
exit "$code"
