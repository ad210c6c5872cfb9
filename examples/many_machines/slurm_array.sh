#!/usr/bin/env bash
# Eight jobs of a Slurm array, each with an eighth of the data; then one that adds them up.
#
#   sbatch slurm_array.sh
#   sbatch --dependency=afterok:JOB --array=0 slurm_array.sh   # JOB: what the first one printed
#
# A job that is stopped and queued again goes on from its last checkpoint. Made for the files of
# ../own_model (python model.py writes them); run it in that folder.
#SBATCH --job-name=scod
#SBATCH --array=1-8
#SBATCH --requeue
#SBATCH --time=01:00:00
set -euo pipefail

PARTS=${PARTS:-8}
MODEL=(model.py:net --weights weights.safetensors)

if [ "${SLURM_ARRAY_TASK_ID}" -eq 0 ]; then
  scod merge "${MODEL[@]}" part-*.scod -o monitor.scod
else
  scod fit "${MODEL[@]}" train.csv --likelihood gaussian --variance 0.3 --rank 30 \
    --shard "${SLURM_ARRAY_TASK_ID}/${PARTS}" \
    --checkpoint "part-${SLURM_ARRAY_TASK_ID}.ckpt" \
    -o "part-${SLURM_ARRAY_TASK_ID}.scod"
fi
