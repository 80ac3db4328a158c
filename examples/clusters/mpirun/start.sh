#!/bin/sh
# On several hosts: mpirun --hostfile hosts -x DDPDOCTOR_RUN -x PYTHONPATH -x MASTER_ADDR -x MASTER_PORT …
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 OMP_NUM_THREADS=1
exec ddpdoctor profile --no-tui -- mpirun --oversubscribe -n 2 python ../train.py
