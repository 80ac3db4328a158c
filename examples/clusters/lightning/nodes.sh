#!/bin/sh
# Two nodes on one host; on two hosts each runs one of these lines, with the same variables of ddpdoctor.
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29502 OMP_NUM_THREADS=1
NODE_RANK=0 python train.py &
NODE_RANK=1 python train.py &
wait
