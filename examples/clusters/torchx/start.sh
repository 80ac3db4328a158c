#!/bin/sh
# TorchX gives the ranks its own environment and what --env names; local_cwd passes ours on by itself.
exec ddpdoctor profile --no-tui -- torchx run --wait -s local_cwd dist.ddp -j 2x1 --script ../train.py \
    --env "OMP_NUM_THREADS=1,SLOW=${SLOW:--1}"
