#!/bin/sh
exec sbatch --wait job.sh
