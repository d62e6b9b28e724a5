"""Asks llama.cpp for the greedy tokens after a prompt: `python ask_llama_cpp.py GGUF COUNT ID...` prints their ids.

It is run by a Python that has xllamacpp, and imports nothing of the project.
"""

import json
import sys

import xllamacpp


def main() -> None:
    path, count, *prompt = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 128
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 1
    request = {"prompt": [int(each) for each in prompt], "max_tokens": int(count), "temperature": 0, "n_probs": 1}
    answer = xllamacpp.Server(params).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    print(json.dumps([token["id"] for token in answer["choices"][0]["logprobs"]["content"]]))


if __name__ == "__main__":
    main()
