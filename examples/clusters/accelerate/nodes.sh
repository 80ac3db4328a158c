#!/bin/sh
# Two nodes on one host. --multi_gpu has Accelerate start torchrun; without it several machines start no process group.
export OMP_NUM_THREADS=1
for node in 0 1; do
    accelerate launch --multi_gpu --num_machines 2 --machine_rank $node --num_processes 2 \
        --main_process_ip 127.0.0.1 --main_process_port 29503 train.py &
done
wait
