"""Words of other trainers: Lightning, Accelerate, Keras, torchrun and DeepSpeed; and ours for each.

A word that people write by habit is answered by the word that it is here, or by where the value
belongs: a plan says how to train, a task says what.
"""

from __future__ import annotations

# our word -> what others call it
SAME = {
    "data": "gpus devices num_devices num_gpus n_gpus ngpus gpu_count workers n_workers processes "
    "num_processes nproc nproc_per_node num_proc world_size ranks np dp dp_size data_parallel "
    "data_parallel_size",
    "tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "pipe": "pp pp_size pipeline pipeline_parallel pipeline_parallel_size "
    "pipeline_model_parallel_size stages num_stages",
    "shard": "fsdp fsdp_size",
    "zero": "zero_stage zero_optimization",
    "batch": "batch_size batchsize train_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu bs",
    "micro": "micro_batches microbatches num_microbatches chunks",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accumulation "
    "gradient_accumulation grad_accum accumulation_steps accum_iter",
    "epochs": "max_epochs num_epochs num_train_epochs n_epochs nb_epoch",
    "steps": "max_steps num_steps train_steps total_steps max_iters train_iters iterations",
    "clip": "gradient_clip_val max_grad_norm clip_grad_norm clip_grad gradient_clipping grad_clip "
    "grad_norm_clip clipnorm",
    "precision": "mixed_precision dtype amp_dtype",
    "loaders": "num_workers dataloader_num_workers loader_workers",
    "seed": "random_seed manual_seed seed_everything",
    "merge": "strategy distributed_strategy algorithm_name",
    "link": "backend ddp_backend distributed_backend process_group_backend",
    "device": "accelerator",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "compile": "torch_compile jit_compile",
    "save": "save_steps save_every checkpoint_every save_strategy every_n_epochs",
    "keep": "save_total_limit save_top_k keep_last",
    "best": "monitor metric_for_best_model",
    "evaluate": "eval_steps eval_every eval_interval evaluation_strategy val_check_interval "
    "check_val_every_n_epoch",
    "timeout_s": "timeout ddp_timeout",
    "restarts": "max_restarts",
    "log": "logger loggers report_to log_with",
    "batchnorm": "sync_batchnorm sync_bn",
}
# values that mean the same there and here
VALUES = {
    "precision": {
        **dict.fromkeys(("32", "32-true", "float32", "no"), "fp32"),
        **dict.fromkeys(("bf16-mixed", "bf16-true", "bfloat16"), "bf16"),
        **dict.fromkeys(("16", "16-mixed", "16-true", "float16", "half"), "fp16"),
    },
    "merge": {
        **dict.fromkeys(("ddp", "auto", "allreduce", "horovod", "mirrored", "mean"), "all_reduce"),
        "localsgd": "local_sgd",
    },
    "device": dict.fromkeys(("gpu", "gpus"), "cuda"),
    "link": {"mpi": "auto"},
    "batchnorm": {"true": "sync", "True": "sync", "false": "local", "False": "local"},
}
SCRIPT = "or give it to a script that reads it: manyhands run FILE -- --{key} {value}"
RATE = "the learning rate is the task's: optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
OPTIMIZER = "the optimizer is the task's: optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)"
SCHEDULE = "the schedule is the task's: schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)"
HOSTS = "on several hosts torchrun or srun starts the processes: torchrun --nnodes 2 ... FILE"
RESUME = "it is an option: manyhands run FILE --resume --dir runs/mine"
FOLDER = "it is an option: manyhands run FILE --dir runs/mine"
# where the value belongs, if not into a plan
ELSEWHERE = {
    RATE: "lr learning_rate base_lr max_lr",
    OPTIMIZER: "optimizer optim opt momentum weight_decay wd betas beta1 beta2 eps nesterov "
    "dampening fused foreach",
    SCHEDULE: "scheduler lr_scheduler lr_scheduler_type warmup warmup_steps warmup_ratio "
    "num_warmup_steps gamma step_size lr_decay",
    "the task gives it: mh.Task(model=..., loss=..., train=..., test=..., metrics={...})": (
        "model loss criterion loss_fn dataset train test metrics metric"
    ),
    "the task gives it: mh.Task(callbacks=[...])": "callbacks callback patience early_stopping ema",
    HOSTS: "nodes num_nodes nnodes num_machines machines hosts node_rank machine_rank "
    "rdzv_endpoint master_addr master_port main_process_ip",
    RESUME: "resume ckpt_path resume_from_checkpoint checkpoint",
    FOLDER: "dir out output output_dir out_dir default_root_dir save_dir log_dir logdir run_dir",
    "loggers are one word: log=wandb, log=mlflow+csv": "wandb mlflow tensorboard csv",
    "write precision=bf16 or precision=fp16": "amp fp16 bf16 half autocast use_amp",
    "write shard=NUMBER of ranks, which share one replica (zero=1, 2 or 3)": (
        "deepspeed fully_shard use_fsdp"
    ),
    "write device=cuda or device=cpu; CUDA_VISIBLE_DEVICES chooses the cards": (
        "gpu gpu_id gpu_ids device_ids cuda use_cuda no_cuda cpu use_cpu"
    ),
}
OURS = {word: ours for ours, words in SAME.items() for word in words.split()}
PLACE = {word: place for place, words in ELSEWHERE.items() for word in words.split()}


def of_word(key: str, value: str) -> str:
    """What to do about another trainer's word; "": it is none."""
    plain = key.lower().lstrip("-").replace("-", "_")
    if plain in OURS:
        ours = OURS[plain]
        return f"did you mean {ours}={VALUES.get(ours, {}).get(value, value)}?"
    if plain in PLACE:
        own = plain in ("lr", "learning_rate", "optimizer", "momentum", "weight_decay", "model")
        return PLACE[plain] + (f"; {SCRIPT.format(key=key, value=value)}" if own else "")
    return ""


def of_value(key: str, value: str) -> str:
    """What to do about another trainer's value of a word of ours; "": it is none."""
    if ours := VALUES.get(key, {}).get(value):
        return f"did you mean {ours}?"
    if key == "device" and value.partition(":")[0] in ("cuda", "gpu"):
        return "each rank takes a card of its own; CUDA_VISIBLE_DEVICES=0 device=cuda chooses"
    if key == "merge" and value in ("fsdp", "zero", "deepspeed"):
        return "set shard=NUMBER of ranks that share one replica, with merge=all_reduce"
    if key == "merge" and value in ("tp", "tensor_parallel", "pp", "pipeline"):
        return "set tensor= or pipe=, with merge=all_reduce"
    if key == "schedule":
        return "of a pipeline; a schedule of the learning rate is the task's: Task(schedule=...)"
    return ""
