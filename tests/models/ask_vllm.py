"""Asks vLLM for the greedy tokens after a prompt: `python ask_vllm.py COUNT CASES.json`.

A case is [FOLDER, [ID, ...], tokens that layers ahead draft, 0 for none]. Prints a line of JSON for each: [class of the
model, [ID, ...], drafted tokens that were right]. It is run by a Python that has vllm, and imports nothing of the
project.
"""

import gc
import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory


def main() -> None:
    count, cases = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    for folder, prompt, drafted in cases:
        drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafted}} if drafted else {}
        llm = LLM(folder, dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=False, **drafts)
        asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        (answer,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], asked, use_tqdm=False)
        config = llm.llm_engine.model_config
        model_class, _ = config.registry.resolve_model_cls(config.architectures, config)
        counted = {metric.name: metric for metric in llm.get_metrics()}
        right = counted["vllm:spec_decode_num_accepted_tokens"].value if drafted else 0
        print(json.dumps([model_class.__name__, list(answer.outputs[0].token_ids), right]), flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
