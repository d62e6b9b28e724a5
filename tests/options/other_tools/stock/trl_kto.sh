export CUDA_VISIBLE_DEVICES=0,1
accelerate launch --num_processes 2 trl/scripts/kto.py --model_name_or_path=MODEL --dataset_name=MARKED \
    --per_device_train_batch_size=4 --num_train_epochs=1 --learning_rate=5e-7 --lr_scheduler_type=cosine \
    --gradient_accumulation_steps=1 --desirable_weight=1.2 --warmup_steps=10 --output_dir=out/kto --bf16 \
    --logging_first_step --report_to none
