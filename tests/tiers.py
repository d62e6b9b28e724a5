"""Which cases of the tests that multiply run where, by file: a regular expression that is searched in a case's name.

A newcomer waits for `make test`. Where one test runs over many families, topologies or settings, `KEPT` names the cases
that stay there, one good one of each behaviour; the others run in `make test-slow`. What `RARE` names has every trait
in common with some other case and runs in `make test-all` alone. A case with a mark of its own keeps it.
"""

from __future__ import annotations

NOTHING = r"(?!)"
KEPT: dict[str, str] = {
    "tests/benchmarks/test_gpu.py": r"^(?!test_a_way_runs_on_a_cpu|test_exactness|.*(A100|H100-8-None|H200-None))",
    "tests/benchmarks/test_unattended.py": r"^(?!test_a_job_ends|test_one_that_hangs|.*benchmarks.gpus)",
    "tests/common/test_parent.py": r"^test_[^\[]*$",
    "tests/data/tokenized/test_cache_builders.py": r"workers_equals|lease_of_somebody_silent",
    "tests/data/chat/test_sandbox.py": r"^(?!.*(macro|piece by piece|number_that_grows))",
    "tests/data/chat/test_sentencepiece_folders.py": r"^(?!test_every_layout)|as published|\[legacy-",
    "tests/models/attention/test_kernels.py": r"^(?!test_a_kernel)|llama|bloom|gemma2",
    "tests/models/conversion/test_convert.py": r"^(?!test_an_export_that_no_run|.*(bin-bf16|bin-fp32|13b))",
    "tests/models/conversion/test_native_layout.py": r"^(?!.*(baichuan2|tokenizer_needs.*chatglm3))",
    "tests/models/derived/test_derived.py": (
        r"^(?!.*(gpt_oss|granite|minimax|qwen3_5_moe|glm|deepseek|cohere|exaone|biogpt|gpt_bigcode|gpt_neo-|\[opt))"
    ),
    "tests/models/test_block_options.py": r"^(?!test_recomputed_and)|llama-tied-None",
    "tests/options/demo/test_generation.py": (
        r"^(?!.*(baichuan|gemma3|some-dense|window|opt|phi3|glm4|olmo2|dynamic|32k))"
    ),
    "tests/models/test_parity.py": r"^(?!.*(13b|baichuan-7b|window|opt))|stored_values",
    "tests/models/parallel/test_tensor.py": r"cannot_be_shared|whole_model\[mixtral\]",
    "tests/options/demo/test_tensor_parallel.py": r"refused_by_every_rank",
    "tests/pretend/test_hangs.py": NOTHING,
    "tests/pretend/test_planted_bugs.py": NOTHING,
    "tests/pretend/test_waits.py": NOTHING,
    "tests/test_quickstart.py": r"^(?!.*words[012])",
    "tests/options/any_layers/test_exactness.py": r"(mixed|tied)-2x1\]",
    "tests/options/planner/auto/test_auto.py": (
        r"^(?!test_(words_that_follow|only_train_ds|what_is_given_up|long_texts|a_batch_of|a_home_folder|adafactor|it_goes_on))"
    ),
    "tests/training/checkpoint/test_local_disks.py": r"^test_[^\[]*$",
    "tests/training/checkpoint/test_partly_trained.py": NOTHING,
    "tests/training/checkpoint/test_resharding.py": r"something_else",
    "tests/training/distributed/test_faults.py": r"pipeline-1-bf16\]|zero-2\]",
    "tests/training/distributed/test_processes.py": r"^(?!test_what_torchrun)",
    "tests/training/engine/test_gradients.py": (
        r"\[(tied-(fp32-2x1|fp32-1x2|bf16-2x1|recompute-2x1|dualpipev_fp32-2x1|sequence-1x2)|mixtral-fp32-2x1)\]"
    ),
    "tests/training/engine/test_shared_reading.py": NOTHING,
    "tests/training/engine/test_zero.py": r"^(?!test_(losses|a_resumed|no_rank|the_layer|evaluation))|\[tied-3\]",
    "tests/training/parallel/test_tensor_axis.py": r"\[tied-1x1x2\]|\[mixtral-1x1x2-spread\]|^test_[^\[]*$",
    "tests/options/planner/test_kernels.py": r"^(?!test_kernels_are_timed|test_the_trial_compiles.*(None|backward))",
    "tests/training/test_bad_runs.py": r"unknown_key|processes without end",
    "tests/training/test_early_signals.py": r"request_in_the_imports|while_weights_load",
    "tests/training/test_exactness.py": (
        r"\[(1x1-5-stage1-micro2of8-dataset|2x1-3\+2-stage1-micro(1of8-batch|3of12-padded)|1x2-5-stage1-micro1of8-padded"
        r"|1x2-zero-stage[03]-micro2of8-padded|1x1-5-stage0-micro2of8-padded)\]"
    ),
    "tests/training/test_fp8_runs.py": NOTHING,
    "tests/training/test_starts.py": (
        r"\[packed\]|moe-to-1x2|another_model|max_steps|left_out_step_does_not.*-1\]|made_up_for|short_row"
    ),
    "tests/training/distributed/test_rendezvous.py": r"^(?!test_(ranks_that_cannot_meet|an_allocator|all_groups))",
    "tests/training/launch/test_slurm.py": r"^(?!test_a_task_that_does_not_come|test_tasks_meet)",
    "tests/training/engine/test_steps.py": r"\[sgd-2x1\]|^test_[^\[]*$",
    "tests/training/metrics/test_tracking.py": r"^(?!test_a_full_disk.*(a while|the end))",
    "tests/options/planner/test_shapes.py": r"^(?!test_a_config_is|test_a_shape_has)|\[(llama-7b|mixtral)",
    "tests/options/planner/test_shared_plans.py": r"^(?!test_the_search)",
    "tests/common/test_lease.py": r"^(?!test_one_of_many)",
    "tests/models/test_fp8.py": r"^(?!test_torchao)",
    "tests/options/planner/test_utilization.py": r"^(?!test_all_ranks_get)",
    "tests/options/demo/test_stages.py": r"^(?!.*phi3-long)",
    "tests/training/checkpoint/test_background.py": NOTHING,
    "tests/training/engine/test_adapters.py": r"^test_[^\[]*$|\[(tied-(fp32-2x1-1\+|dualpipev)|mixtral-fp32-2x1)",
    "tests/options/preference/test_gradients.py": r"\[kto-tied-2x1\]",
    "tests/options/weight_streaming/test_gradients.py": NOTHING,
    "tests/options/streamed_data/test_stream.py": r"^(?!test_every_record_comes)",
    "tests/training/distributed/test_communication.py": r"^(?!test_a_grid_of_512)",
    "tests/test_launching.py": r"^(?!test_the_whole_tree)",
    "tests/training/checkpoint/test_exporting.py": r"^(?!test_ranks_write)",
    "tests/options/demo/test_answers.py": r"^(?!.*(</s>|observation))",
    "tests/options/demo/test_chat.py": r"^(?!test_an_answer_is_shown|test_twenty.*(chatglm3|chatml))",
    "tests/training/distributed/test_signals.py": r"^(?!test_only_a_later)|\[together-asked",
    "tests/training/launch/test_supervisor.py": r"^(?!test_ranks_save.*(10-|agent)|test_what_a_dead)",
    "tests/data/chat/test_native_tokenizers.py": r"^(?!test_(the_folders|an_export).*(baichuan2|chatglm3))",
    "tests/options/planner/test_layer_costs.py": r"^(?!.*(window.*False|gpt_oss))",
    "tests/benchmarks/test_wheels.py": r"^(?!test_a_private)",
    "tests/options/distillation/test_runs.py": NOTHING,
    "tests/training/test_learned_positions.py": NOTHING,
    "tests/options/preference/test_runs.py": NOTHING,
    "tests/training/test_preflight.py": r"^(?!test_what_differs)",
    "tests/options/scores/test_runs.py": NOTHING,
}
RARE: dict[str, str] = {
    "tests/docs/test_api.py": r"test_what_trains\[[02345]\]",
    "tests/models/checkpoint/test_streaming.py": r"llama-pytorch_model.bin",
    "tests/models/test_fp8.py": r"compiled_it_rounds",
    "tests/models/test_weight_gradients.py": r"compiled_layers",
    "tests/pretend/test_hangs.py": r"shares_rows|in_a_computation",
    "tests/pretend/test_waits.py": (
        r"\[(llama-tied-(unsharded|unpacked|optimizer-on|generation|fp8|nf4|1f1b-sums|replicas-bf16|layers-bf16)|bloom-flex)"
    ),
    "tests/test_package.py": r"commands_are_entry_points",
    "tests/options/planner/auto/test_auto_run.py": r"dry_run",
    "tests/training/checkpoint/test_background.py": r"killed_and_stopped",
    "tests/training/launch/test_restarts.py": r"killed_rank_changes_no_bit",
    "tests/options/timeline/test_timeline.py": r"dualpipev_has",
    "tests/models/attention/test_kernels.py": (
        r"\[(mixtral|qwen2|qwen3_moe|phi3|olmo2|glm4?|baichuan2-7b|chatglm3)-.*(cudnn|torch_varlen-False|flash_attention_3)"
    ),
    "tests/models/test_block_options.py": r"test_compiled_blocks.*\[(llama-tied-kept|mixtral-.*)\]",
    "tests/test_quickstart.py": r"words[12]",
    "tests/options/demo/test_stages.py": r"\[(llama-dynamic-2x2|both)\]|a_runs_checkpoint\[stages\]",
    "tests/training/distributed/test_faults.py": (
        r"\[(pipeline-\d|zero-0(-bf16)?|zero-2(-bf16)?|zero-3)-gradient_clipping\]|\[zero-1(-bf16.*)?\]|\[zero-3-bf16\]"
    ),
    "tests/training/engine/test_gradients.py": (
        r"\[tied-(compiled|dualpipev_compiled-|flex-|dualpipev_flex|dualpipev_unpacked|without_zero|bf16-2x2|sequence-2x2"
        r"|sequence_unpacked-2x2)|\[mixtral-dualpipev_(default|uneven|recompute|fp32-2x2)|\[few_key_heads-fp32"
        r"|\[tied-(fp32-[14]x1|unpacked|every_second|auto|flex_recompute|offload|bf16_offload|bf16_without_zero-1x2)"
        r"|\[(bloom|baichuan2-13b)-fp32|\[tied-dualpipev_compiled|\[mixtral-(recompute|default)"
    ),
    "tests/training/engine/test_zero.py": (
        r"\[(linear-3|mixtral-3-recompute|linear-experts-3|offload-3)\]|test_the_layer_files.*\[(untied|bf16)-3\]"
    ),
    "tests/training/test_early_signals.py": r"imports_end.*\[(15-train_ds_z|2-train_ds.py|1-.*(zero|launches))",
    "tests/training/test_exactness.py": (
        r"\[(1x1-5-stage1-micro([14]of8-padded|1of8-.*t)|2x1-1\+4|2x1-3\+2-stage1-micro(4of8-padded|2of8-dataset)|4x1-2\+"
        r"|1x2-5-stage1-micro4|1x1-zero-stage0|1x2-zero-(stage2-micro[24]|stage3-micro1of8-[pd]|stage0-micro1of8-batch))"
    ),
    "tests/training/test_gdgpt_config.py": r"\[zero\]",
    "tests/training/test_starts.py": (
        r"\[(lion|lion-unpacked|zero-1-dropout|moe-to-zero-2)\]|left_out_step_does_not.*\[(pipeline-0-bf16|zero-[02])\]"
    ),
}
