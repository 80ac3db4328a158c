#!/bin/sh
# On a cluster that runs already: eval "$(ddpdoctor profile --env)", and pass both variables on as the runtime_env of
# ray.init, {"env_vars": {...}}; the run directory has to be on a disk that all nodes share.
export OMP_NUM_THREADS=1
exec ddpdoctor profile --no-tui -- python train.py
