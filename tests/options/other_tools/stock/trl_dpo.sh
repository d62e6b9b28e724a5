#!/bin/bash
# Direct preference optimization on one machine
trl dpo \
    --model_name_or_path MODEL \
    --dataset_name PAIRS \
    --learning_rate 5.0e-7 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --max_prompt_length 512 \
    --max_length 1024 \
    --beta 0.05 \
    --logging_steps 25 \
    --output_dir out/dpo \
    --no_remove_unused_columns
