#!/bin/sh
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=1 --output=train-%j.out
# The ranks of both nodes write their record to the home directory, which the nodes share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${FIRST_HOST:-$MASTER_ADDR} MASTER_PORT=29500 OMP_NUM_THREADS=1
ddpdoctor profile --no-tui --on-hang "scancel $SLURM_JOB_ID" -- srun python ../train.py
