"""The checks that come with ddpdoctor, one file each, and the index that says where each one is.

The index is written by hand so that a command imports only the checks that it runs: a check's name is the name of its
module with hyphens.

An entry of a check that reads the source has the check's trigger words beside it::

    BUILT_IN = {..., "DDP102": "ddpdoctor.checks.data.missing_set_epoch", ...}
    READ_IN_SOURCE = {..., "DDP102": ("DistributedSampler",), ...}

A check is imported and asked only when at least one of its words occurs somewhere in the text of the script or of a
project module that it imports: any part of a word counts, upper and lower case differ, and comments count too. So the
words have to be such that a script without all of them cannot have the defect, under any import and any alias: take the
last name of what is called (``DistributedSampler``, ``all_reduce``), never a dotted name (``torch.save``), which an
import may split. One short word that covers several (``DataParallel``) is better than a list.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "DDP101": "ddpdoctor.checks.data.missing_distributed_sampler",
    "DDP102": "ddpdoctor.checks.data.missing_set_epoch",
    "DDP103": "ddpdoctor.checks.data.uneven_inputs",
    "DDP104": "ddpdoctor.checks.data.identical_random_seed",
    "DDP105": "ddpdoctor.checks.data.sharded_evaluation_bias",
    "DDP107": "ddpdoctor.checks.data.unseeded_random_split",
    "DDP108": "ddpdoctor.checks.data.rank_varying_dataset",
    "DDP109": "ddpdoctor.checks.data.download_race",
    "DDP201": "ddpdoctor.checks.gradients.unused_parameters",
    "DDP202": "ddpdoctor.checks.gradients.needless_find_unused_parameters",
    "DDP203": "ddpdoctor.checks.gradients.wasted_broadcast_buffers",
    "DDP204": "ddpdoctor.checks.gradients.missing_no_sync",
    "DDP205": "ddpdoctor.checks.gradients.unsynchronised_batchnorm",
    "DDP206": "ddpdoctor.checks.gradients.optimizer_misplaced",
    "DDP207": "ddpdoctor.checks.gradients.forward_bypasses_ddp",
    "DDP208": "ddpdoctor.checks.gradients.diverged_replicas",
    "DDP209": "ddpdoctor.checks.gradients.dataparallel",
    "DDP210": "ddpdoctor.checks.gradients.parameter_ready_twice",
    "DDP211": "ddpdoctor.checks.gradients.no_gradient_bucket_view",
    "DDP213": "ddpdoctor.checks.gradients.module_changed_after_wrap",
    "DDP214": "ddpdoctor.checks.gradients.missing_ddp_wrap",
    "DDP215": "ddpdoctor.checks.gradients.wrapper_attribute_access",
    "DDP216": "ddpdoctor.checks.gradients.accumulation_tail",
    "DDP217": "ddpdoctor.checks.gradients.misplaced_no_sync",
    "DDP218": "ddpdoctor.checks.gradients.double_wrap",
    "DDP219": "ddpdoctor.checks.gradients.syncbn_after_wrap",
    "DDP220": "ddpdoctor.checks.gradients.autograd_grad_bypass",
    "DDP221": "ddpdoctor.checks.gradients.rank_zero_load",
    "DDP301": "ddpdoctor.checks.collectives.rank_divergent_collective",
    "DDP302": "ddpdoctor.checks.collectives.data_dependent_divergence",
    "DDP303": "ddpdoctor.checks.collectives.rank_zero_forward",
    "DDP304": "ddpdoctor.checks.collectives.collective_mismatch",
    "DDP305": "ddpdoctor.checks.collectives.hang",
    "DDP306": "ddpdoctor.checks.collectives.early_exit",
    "DDP307": "ddpdoctor.checks.collectives.long_wait",
    "DDP309": "ddpdoctor.checks.collectives.subset_new_group",
    "DDP311": "ddpdoctor.checks.collectives.exception_divergence",
    "DDP312": "ddpdoctor.checks.collectives.silent_desync",
    "DDP313": "ddpdoctor.checks.collectives.barrier_in_hot_loop",
    "DDP314": "ddpdoctor.checks.collectives.ddp_on_subset",
    "DDP315": "ddpdoctor.checks.collectives.discarded_collective_result",
    "DDP316": "ddpdoctor.checks.collectives.reduce_before_backward",
    "DDP317": "ddpdoctor.checks.collectives.sum_as_mean",
    "DDP404": "ddpdoctor.checks.speed.input_bound",
    "DDP406": "ddpdoctor.checks.speed.host_sync_in_loop",
    "DDP407": "ddpdoctor.checks.speed.full_precision_matmul",
    "DDP501": "ddpdoctor.checks.launch.wrong_rank_kind",
    "DDP502": "ddpdoctor.checks.launch.missing_set_device",
    "DDP503": "ddpdoctor.checks.launch.deprecated_launcher",
    "DDP504": "ddpdoctor.checks.launch.hard_coded_rendezvous",
    "DDP505": "ddpdoctor.checks.launch.backend_mismatch",
    "DDP506": "ddpdoctor.checks.launch.group_not_destroyed",
    "DDP507": "ddpdoctor.checks.launch.small_shared_memory",
    "DDP509": "ddpdoctor.checks.launch.unsafe_environment",
    "DDP510": "ddpdoctor.checks.launch.missing_rank_environment",
    "DDP511": "ddpdoctor.checks.launch.fork_after_cuda",
    "DDP512": "ddpdoctor.checks.launch.late_cuda_visible_devices",
    "DDP514": "ddpdoctor.checks.launch.collective_before_set_device",
    "DDP515": "ddpdoctor.checks.launch.cpu_tensor_with_nccl",
    "DDP516": "ddpdoctor.checks.launch.uncalled_rank_guard",
    "DDP517": "ddpdoctor.checks.launch.wrong_sampler_rank",
    "DDP601": "ddpdoctor.checks.state.save_on_all_ranks",
    "DDP602": "ddpdoctor.checks.state.load_without_map_location",
    "DDP603": "ddpdoctor.checks.state.unsynchronised_load",
    "DDP604": "ddpdoctor.checks.state.module_prefix",
    "DDP605": "ddpdoctor.checks.state.log_on_all_ranks",
    "DDP606": "ddpdoctor.checks.state.local_metric",
    "DDP608": "ddpdoctor.checks.state.shared_path_race",
    "DDP706": "ddpdoctor.checks.death.root_exception",
}
"""Dotted module of every check by its code."""

AFTER_LAUNCH: frozenset[str] = frozenset()
"""Checks of what only a job itself shows, live or dead: neither a source nor a rehearsal says anything about it."""

READ_IN_SOURCE: Mapping[str, tuple[str, ...]] = {
    "DDP101": ("DataLoader",),
    "DDP102": ("DistributedSampler",),
    "DDP104": ("seed",),
    "DDP105": ("DistributedDataParallel",),
    "DDP107": ("random_split", "train_test_split", "Subset", "DistributedSampler"),
    "DDP108": ("DistributedSampler",),
    "DDP109": ("download", "urlretrieve", "extractall", "unpack_archive"),
    "DDP201": ("DistributedDataParallel",),
    "DDP202": ("find_unused_parameters",),
    "DDP203": ("DataParallel", "Accelerator"),
    "DDP204": ("DistributedDataParallel",),
    "DDP205": ("BatchNorm",),
    "DDP206": ("optim",),
    "DDP207": ("DistributedDataParallel",),
    "DDP209": ("DataParallel",),
    "DDP211": ("DistributedDataParallel",),
    "DDP213": ("DistributedDataParallel",),
    "DDP214": ("DistributedSampler",),
    "DDP215": ("DistributedDataParallel",),
    "DDP216": ("enumerate",),
    "DDP217": ("no_sync",),
    "DDP218": ("DistributedDataParallel",),
    "DDP219": ("convert_sync",),
    "DDP220": ("autograd", "retain_graph"),
    "DDP221": ("load_state_dict",),
    "DDP301": ("distributed", "Distributed", "ccelerat", "horovod"),
    "DDP302": ("distributed", "Distributed", "ccelerat", "horovod"),
    "DDP303": ("DataParallel",),
    "DDP307": ("distributed", "ccelerat"),
    "DDP309": ("new_group",),
    "DDP311": ("except",),
    "DDP313": ("barrier", "wait_for_everyone", "reduce"),
    "DDP314": ("DataParallel",),
    "DDP315": ("reduce", "gather", "broadcast", "scatter", "to_all", "toall", "pad_across"),
    "DDP316": ("reduce",),
    "DDP317": ("reduce",),
    "DDP404": ("DataLoader",),
    "DDP406": ("DataParallel",),
    "DDP407": ("DataParallel",),
    "DDP501": ("rank", "RANK", "SLURM_"),
    "DDP502": ("cuda",),
    "DDP503": ("local_rank", "local-rank", "launch"),
    "DDP504": ("init_process_group",),
    "DDP505": ("init_process_group",),
    "DDP506": ("init_process_group",),
    "DDP510": ("init_process_group",),
    "DDP511": ("num_workers", "Process("),
    "DDP512": ("CUDA_VISIBLE_DEVICES",),
    "DDP514": ("set_device",),
    "DDP515": ("nccl", "NCCL"),
    "DDP516": ("rank", "RANK", "is_", "main", "master", "primary", "distributed"),
    "DDP517": ("DistributedSampler",),
    "DDP601": ("save", "write_text", "write_bytes", "to_csv", "to_parquet", "dump"),
    "DDP602": ("load",),
    "DDP603": ("save", "open(", "write_text", "write_bytes", "to_csv", "to_parquet", "dump", "shutil"),
    "DDP604": ("load_state_dict",),
    "DDP605": ("print", "tqdm", "trange", "wandb", "mlflow", "SummaryWriter", "Experiment"),
    "DDP606": ("print", "wandb", "add_scalar", "log_metric"),
    "DDP608": ("mkdir", "makedirs", "rmtree", "remove", "unlink", "rmdir", "rename", "replace", "sleep"),
}
"""Trigger words of the checks that have ``in_source``; the others need a run and are not imported without one."""
