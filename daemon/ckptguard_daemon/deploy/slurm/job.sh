#!/bin/bash
# A Slurm job that trains, is verified meanwhile, and starts from a good checkpoint. Edit the run and the last command.
#   ckptguard-daemon --example slurm-job > job.sh
#   sbatch job.sh
#SBATCH --job-name=exp1
#SBATCH --nodes=1
#SBATCH --requeue
#SBATCH --comment="ckptguard=/scratch/me/runs/exp1"
BIN=/opt/ckptguard/bin
RUN=/scratch/me/runs/exp1

mkdir -p "$RUN"
# It ends with this script. What it has not verified by then, the epilog does.
"$BIN/ckptguard-daemon" "$RUN" --parent $$ &
# The gate reads the newest good checkpoint again, moves newer ones that are bad aside, and then becomes the training.
"$BIN/ckptguard" gate "$RUN" -- srun python train.py --output_dir "$RUN"
