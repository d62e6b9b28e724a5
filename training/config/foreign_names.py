"""Map keys of other tools to Pipetune's."""

from __future__ import annotations

TOOLS = {"H": "HF Trainer", "T": "TRL", "A": "axolotl", "L": "LLaMA-Factory", "S": "ms-swift", "D": "DeepSpeed"}
_WARMUP, _DIMS = "scheduler.params.warmup_num_steps", "model_topo.process_topology.dims"
_THIRD = "the third number, with axes: [pipe, data, model]"
OTHERS = [  # our key, or none where there is no such thing; advice; names, each with the letters of its tools
    ("model_path", "", "model_name_or_path:TL base_model:A model:S"),
    ("data_path", "", "dataset:LS datasets:A dataset_name:T"),
    ("save_path", "", "output_dir:HTALS"),
    ("prompt_format", "chat_template, plain, gdgpt, a Jinja file", "template:LS chat_template:A chat_template_path:T"),
    ("train_micro_batch_size_per_gpu", "", "per_device_train_batch_size:HTLS micro_batch_size:A"),
    ("n_epoches", "", "num_train_epochs:HTLS num_epochs:A epochs: epoch:"),
    ("max_seq_len", "", "cutoff_len:L sequence_len:A max_length:TS max_seq_length:T model_max_length:H"),
    ("packing", "batch, dataset or false", "sample_packing:A neat_packing:L"),
    ("mask", "assistant, last_turn or all", "train_on_inputs:A train_on_prompt:L assistant_only_loss:T"),
    ("optimizer.type", "AdamW, Adam, Lion, Adafactor or SGD", "optim:HTLS"),
    ("optimizer.params.lr", "", "learning_rate:HTALS lr:D"),
    ("optimizer.params.weight_decay", "", "weight_decay:HTALSD"),
    ("optimizer.params.betas", "a pair such as [0.9, 0.95]", "adam_beta1:HTALS adam_beta2:HTALS betas:D"),
    ("optimizer.params.eps", "", "adam_epsilon:HTALS eps:D"),
    ("scheduler.type", "WarmupCosineLR, linear, constant or WSD", "lr_scheduler_type:HTLS lr_scheduler:A"),
    (_WARMUP, "", "warmup_steps:HTALS num_warmup_steps:H"),
    (_WARMUP, "a number of steps, not a share of them", "warmup_ratio:HTALS"),
    ("gradient_clipping", "", "max_grad_norm:HTALS"),
    ("use_grad_ckpt", "", "gradient_checkpointing:HTALS"),
    ("use_flash_attn", "", "flash_attention:A flash_attn:L attn_impl:S attn_implementation:T"),
    ("zero_optimization.stage", "", "zero_stage:"),
    (_DIMS, "[stages, replicas]", "num_gpus: pipeline_parallel: pipeline_model_parallel_size:S"),
    (_DIMS, _THIRD, "tensor_parallel:D tensor_parallel_size:A tensor_model_parallel_size:S"),
    ("model_topo.sequence", "", "sequence_parallel_size:S context_parallel_size:A"),
    ("save_interval", "in steps", "save_steps:HTALS save_strategy:HTALS"),
    ("keep_last", "", "save_total_limit:HTALS"),
    ("resume", "auto, none or a checkpoint's folder", "resume_from_checkpoint:HTALS"),
    ("steps_per_print", "", "logging_steps:HTALS"),
    ("eval_interval", "in steps", "eval_steps:HTALS eval_strategy:HTALS evaluation_strategy:HTA"),
    ("eval_share", "a share of data_path, not a count", "val_set_size:A val_size:L split_dataset_ratio:S"),
    ("trackers", "tensorboard, wandb, swanlab or mlflow, in a list", "report_to:HTLS use_swanlab:L"),
    ("lora.r", "", "lora_r:A lora_rank:LS"),
    ("lora.alpha", "", "lora_alpha:ALS"),
    ("lora.dropout", "", "lora_dropout:ALS"),
    ("lora.rslora", "", "peft_use_rslora:A use_rslora:LS"),
    ("lora.targets", "", "lora_target_modules:A lora_target_linear:A lora_target:L target_modules:S"),
    ("lora.lr_ratio", "", "loraplus_lr_ratio:AL lorap_lr_ratio:S"),
    ("lora.modules_to_save", "", "lora_modules_to_save:A additional_target:L modules_to_save:S"),
    ("lora.start_from", "", "lora_model_dir:A adapter_name_or_path:L adapters:S"),
    ("freeze", "what is not trained", "unfrozen_parameters:A freeze_trainable_layers:L freeze_parameters:S"),
    ("preference.loss", "dpo, cdpo, ipo, simpo, orpo, kto or reward", "pref_loss:L rlhf_type:S rl:A loss_type:T"),
    ("preference.beta", "", "pref_beta:L dpo_beta:A rl_beta:A"),
    ("preference.sft_weight", "", "pref_ftx:L rpo_alpha:TAS"),
    ("preference.gamma", "", "simpo_gamma:LTAS cpo_simpo_gamma:A"),
    ("preference.desirable_weight", "", "desirable_weight:TS kto_desirable_weight:A kto_chosen_weight:L"),
    ("preference.undesirable_weight", "", "undesirable_weight:TS kto_undesirable_weight:A kto_rejected_weight:L"),
    ("", "a lora section trains adapters", "adapter:A finetuning_type:L tuner_type:S"),
    ("lora.base", "nf4", "load_in_4bit:TA quantization_bit:L quant_bits:S"),
    ("", "code of a model's folder is never run", "trust_remote_code:TAL"),
    ("", "the tokenizer is the one in model_path", "tokenizer: tokenizer_name:H tokenizer_type:A"),
    ("", "write DeepSpeed's keys into this file", "deepspeed:HTALS"),
    ("", "train_ds_zero.py shards the weights with zero_optimization.stage: 3", "fsdp:HTALS fsdp_config:HTA"),
    ("", "upload the exported folder afterwards, with hf upload", "push_to_hub:HTLS hub_model_id:HTALS"),
    ("", "the best checkpoint by evaluation is kept", "early_stopping_patience:A load_best_model_at_end:HTAL"),
]
FOREIGN = {
    name: (key, advice, [TOOLS[letter] for letter in tools])
    for key, advice, names in OTHERS
    for name, _, tools in (each.partition(":") for each in names.split())
}
