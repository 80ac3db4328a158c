# a baby model, good for debugging
out_dir = "out-tiny"
eval_interval = 3
eval_iters = 2
block_size = 16
n_embd = 32
max_iters = 40
