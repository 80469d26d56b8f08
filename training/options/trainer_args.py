"""Read a user's TrainingArguments for ``--engine trainer``, and refuse those that kit decides."""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nodekit.training.engine_info import EngineError
from nodekit.training.options.deepspeed_config import read_object

OPTION = "--training-args"
TAKEN = (
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("ddp_bucket_cap_mb", "ddp_static_graph"),
    *("tf32", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "debug"),
)
"""The arguments that a user may set."""

DECIDED = {
    "--output": "output_dir overwrite_output_dir logging_dir",
    "--batch-size and --micro-batch": "per_device_train_batch_size per_gpu_train_batch_size auto_find_batch_size",
    "--accumulate": "gradient_accumulation_steps torch_empty_cache_steps",
    "--epochs": "num_train_epochs max_steps",
    "--lr": "learning_rate",
    "--schedule": "lr_scheduler_type lr_scheduler_kwargs",
    "--warmup-steps": "warmup_steps warmup_ratio",
    "--clip": "max_grad_norm",
    "--amp": "bf16 fp16 bf16_full_eval fp16_full_eval fp16_backend fp16_opt_level half_precision_backend",
    "--compile": "torch_compile torch_compile_backend torch_compile_mode torchdynamo",
    "--find-unused": "ddp_find_unused_parameters",
    "--backend": "ddp_backend",
    "--timeout": "ddp_timeout",
    "--seed": "seed data_seed full_determinism",
    "--num-workers": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last",
    "--eval-every": "eval_strategy evaluation_strategy eval_steps eval_delay eval_on_start do_eval",
    "--snapshot-every": "save_strategy save_steps save_only_model save_on_each_node save_safetensors "
    "enable_jit_checkpoint",
    "--keep": "save_total_limit",
    "--best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "--resume-from": "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
    "--track": "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "--engine deepspeed": "deepspeed",
    "--engine fsdp": "fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap parallelism_config",
    "the task's optimizer": "optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "adafactor",
    "the task's model": "use_cache use_liger_kernel liger_kernel_config neftune_noise_alpha",
    "the task's loss": "label_smoothing_factor average_tokens_across_devices label_names",
    "the task's data": "remove_unused_columns group_by_length train_sampling_strategy length_column_name "
    "accelerator_config split_batches dispatch_batches per_device_eval_batch_size per_gpu_eval_batch_size "
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics include_inputs_for_metrics batch_eval_metrics jit_mode_eval",
    "kit, which gives all ranks the buffers of rank 0 in each step": "ddp_broadcast_buffers",
    "kit, which reports each step": "logging_strategy logging_steps logging_first_step logging_nan_inf_filter "
    "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics",
    "whoever starts the ranks": "local_rank use_cpu no_cuda use_mps_device ray_scope",
    "nobody, since kit sends nothing to the hub": "push_to_hub push_to_hub_model_id push_to_hub_token "
    "push_to_hub_organization hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
    "kit test and kit predict": "do_train do_predict",
}
"""What decides instead, for the message → the refused arguments, of transformers 4 and 5."""

_DECIDED_BY = {name: by for by, names in DECIDED.items() for name in names.split()}


def read_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments in a user's file, all of which are in ``TAKEN``.

    Raises:
        EngineError: the file cannot be read, or has other arguments; the message names all of them.
    """
    found = read_object(path, OPTION)
    if problems := list(_problems(found)):
        raise EngineError(f"{OPTION} {path}: {'; '.join(problems)}; left to you are {', '.join(TAKEN)}")
    return found


def _problems(found: dict[str, Any]) -> Iterator[str]:
    for name in found:
        if name in _DECIDED_BY:
            yield f"{name} is decided by {_DECIDED_BY[name]}"
        elif name not in TAKEN:
            near = get_close_matches(name, [*TAKEN, *_DECIDED_BY], n=1)
            yield f"there is no {name}{f' (did you mean {near[0]}?)' if near else ''}"
