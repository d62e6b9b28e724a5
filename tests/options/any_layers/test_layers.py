"""Layers are divided, samples drawn, and mistakes found before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

from common.log import Log
from options.any_layers import Pipeline, PipelineConfig, load_trained
from options.any_layers.samples import SampleLoader
from options.any_layers.stage import Layer, divide_layers, make, on_no_device, shared_weights
from options.any_layers.task import Layers
from tests.launching import topology
from training.distributed.disk import Disk
from training.errors import ConfigError


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, width, bias=False)


def config(**keys: Any) -> PipelineConfig:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    return PipelineConfig.model_validate({"save_path": "run", **sizes, **keys})


def tiny_t5() -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model: nn.Module = T5ForConditionalGeneration(T5Config(**sizes))
    return model


def points(count: int = 21) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).unsqueeze(1), torch.arange(count))


class TestDivision:
    def test_by_parameters(self) -> None:
        layers: list[Layer] = [linear(4), lambda: linear(4), nn.ReLU(), lambda: linear(8), linear(4)]
        assert divide_layers(layers, None, 2) == [3, 2]
        assert divide_layers([linear(4), lambda: nn.Linear(10**6, 10**6), linear(4)], None, 3) == [
            1,
            1,
            1,
        ]  # takes no memory

    def test_what_a_function_makes_depends_on_the_seed_alone(self) -> None:
        first = make(lambda: linear(3), 5)
        torch.rand(1)
        second = make(lambda: linear(3), 5)
        assert torch.equal(first.weight, second.weight)  # type: ignore[arg-type]
        assert not torch.equal(first.weight, make(lambda: linear(3), 6).weight)  # type: ignore[arg-type]

    def test_a_weight_may_lie_on_two_stages(self) -> None:
        shared, frozen = linear(4), linear(4).requires_grad_(False)
        layers = [shared, frozen, nn.Sequential(nn.ReLU(), shared), frozen]
        assert divide_layers(layers, [1, 3], 2) == [1, 3]
        assert shared_weights(layers) == [[(0, "weight"), (2, "1.weight")]]
        made = on_no_device([lambda: shared, nn.ReLU, lambda: shared])
        assert shared_weights(made) == [[(0, "weight"), (2, "weight")]]

    def test_a_complex_weight_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"layers: weight of layer 1 \(Linear\) is complex"):
            divide_layers([linear(4), nn.Linear(4, 4, bias=False, dtype=torch.complex64)], None, 2)

    def test_weights_lie_in_layers_alone(self) -> None:
        def read(loss: Any) -> None:
            Layers(Pipeline([linear(4)], loss=loss), points()).read(config(), Disk("", [0], 0), Log(quiet=True))

        read(nn.CrossEntropyLoss(weight=torch.ones(4)))
        with pytest.raises(ConfigError, match="loss: has weights"):
            read(linear(4))

    def test_too_few_layers(self) -> None:
        with pytest.raises(ConfigError, match="3 stages for 2 layers"):
            divide_layers([linear(4), linear(4)], None, 3)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(4), linear(4)

    def forward(self, inputs: Any) -> Any:
        return self.last(self.first(inputs).relu())


class Residual(nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        return inputs + super().forward(inputs)


class TestWholeModels:
    @pytest.mark.parametrize(
        ("given", "found"),
        [
            (Whole(), "found Whole, whose forward is its own: list its layers in the order"),
            (Residual(linear(4)), "found Residual, whose forward is its own: list its layers"),
            (nn.ModuleDict({"a": linear(4)}), "found str"),
            (tiny_t5(), "found T5ForConditionalGeneration, whose forward is its own: a decoder: save_pretrained it to"),
            (7, "found int"),
            ([linear(4), "linear"], "found str"),
        ],
        ids=["module", "sequential", "dict", "transformers", "number", "text"],
    )
    def test_what_is_no_sequence_of_layers_ends_in_a_line(
        self, given: Any, found: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            Pipeline(given, loss=F.mse_loss, save_path="run", train_batch_size=8)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert line.startswith(f"error: layers: expected an nn.Sequential or a list of layers; {found}")
        with pytest.raises(ConfigError):
            load_trained(given, "run")

    def test_a_list_of_modules_is_taken(self) -> None:
        held = nn.ModuleList([linear(4), linear(4)])
        assert Pipeline(held, loss=F.mse_loss, save_path="run", train_batch_size=8).layers == list(held)


class TestConfig:
    def test_processes_beyond_the_stages_are_replicas(self) -> None:
        pipeline = Pipeline([linear(4)] * 3, loss=F.mse_loss, parts=[1, 2], save_path="run", train_batch_size=8)
        assert pipeline.config(processes=4).model_topo.process_topology.dims == [2, 2]
        assert pipeline.config(processes=0).model_topo.process_topology.dims == [2, 1]
        assert pipeline.config(processes=2).model_topo.parts == [1, 2]

    def test_only_how_many_stages(self) -> None:
        pipeline = Pipeline([linear(4)] * 3, loss=F.mse_loss, parts=3, save_path="run", train_batch_size=8)
        topo = pipeline.config(processes=3).model_topo
        assert (topo.stages, topo.parts) == (3, None)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"packing": "batch"}, "packing: a key of language models"),
            ({"schedule": "dualpipev"}, "schedule: a key of language models"),
            ({"freeze": ["0"]}, "freeze: a key of language models"),
            ({"preference": {"loss": "dpo"}}, "preference: a key of language models"),
            ({"offload_activations": True}, "offload_activations: a key of language models"),
            ({"use_grad_ckpt": "auto"}, "use_grad_ckpt: auto knows the blocks of language models"),
            ({"eval_data_path": "a.json"}, "eval_data_path: a key of language models"),
            ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: 3: each stage of a Pipeline holds its lay"),
            ({"train_batchsize": 8}, "unknown key train_batchsize; did you mean train_batch_size?"),
            ({"optimizer": {"type": "Adm"}}, "optimizer.type: expected 'AdamW'"),
            ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size: 8 is not a multiple of 3"),
        ],
    )
    def test_a_wrong_key_is_one_line(self, keys: dict[str, Any], message: str) -> None:
        pipeline = Pipeline([linear(4)], loss=F.mse_loss, save_path="run", train_batch_size=8, **keys)
        with pytest.raises(ConfigError) as error:
            pipeline.config(processes=1)
        assert str(error.value).startswith(message)

    def test_keys_beside_a_config(self) -> None:
        with pytest.raises(ConfigError, match="config: given together with seed, parts"):
            Pipeline([linear(4)], loss=F.mse_loss, config=config(), seed=1, parts=1).config(processes=1)

    def test_no_process_shares_a_layer_or_a_row(self) -> None:
        grid = {"process_topology": {"axes": ["pipe", "data", "model"], "dims": [1, 1, 2]}}
        with pytest.raises(ValidationError, match="a Pipeline shards no layers"):
            config(model_topo=grid)
        with pytest.raises(ValidationError, match="only language models have sequences to share"):
            config(model_topo=topology((1, 2)) | {"sequence": 2})

    def test_a_json_file_of_deepspeed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("ds.json").write_text('{"gradient_clipping": 0.25}', encoding="utf-8")
        assert config(deepspeed_config="ds.json").gradient_clipping == 0.25

    def test_the_resolved_config_is_one_again(self) -> None:
        assert PipelineConfig.model_validate(config(bf16={"enabled": True}).dump()) == config(bf16={"enabled": True})


class TestSamples:
    def test_an_epoch_sees_each_sample_at_most_once(self) -> None:
        loader = SampleLoader(points(), config())
        assert loader.steps_per_epoch == 2
        for epoch in range(2):
            seen = [number for step in range(2) for number in loader.batch(2 * epoch + step).samples]
            assert len(seen) == len(set(seen)) == 16
        assert loader.batch(0).samples != loader.batch(2).samples

    def test_replicas_share_a_batch(self) -> None:
        alone, shared = SampleLoader(points(), config()), SampleLoader(points(), config(model_topo=topology((1, 2))))
        batch = shared.batch(5)
        assert batch.n_micro_batches == 2
        assert sorted(batch.samples) == sorted(alone.batch(5).samples)
        seen = [labels[0] for replica in range(2) for _, labels in shared.micro_batches(batch, replica)]
        assert sorted(torch.cat(seen).tolist()) == sorted(batch.samples)

    def test_an_evaluation_sees_all_that_fills_a_micro_batch(self) -> None:
        loader = SampleLoader(points(21), config(model_topo=topology((1, 2))), evaluates=True)
        batches = [loader.batch(position) for position in range(loader.steps_per_epoch)]
        assert [len(batch.samples) for batch in batches] == [8, 8, 4]
        assert sorted(number for batch in batches for number in batch.samples) == list(range(20))

    def test_floating_point_inputs_have_the_dtype_to_train_in_and_labels_their_own(self) -> None:
        dataset = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
        loader = SampleLoader(dataset, config(bf16={"enabled": True}))
        inputs, labels = next(loader.micro_batches(loader.batch(0), 0))
        assert (inputs[0].dtype, labels[0].dtype) == (torch.bfloat16, torch.float32)

    def test_random_samples_depend_on_seed_and_step_alone(self) -> None:
        class Random(Dataset[Any]):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, number: int) -> Any:
                return torch.rand(3), number

        def drawn(step: int, seed: int = 1) -> torch.Tensor:
            loader = SampleLoader(Random(), config(seed=seed))
            return torch.cat([inputs[0] for inputs, _ in loader.micro_batches(loader.batch(step), 0)])

        before = torch.get_rng_state()
        assert torch.equal(drawn(3), drawn(3))
        assert torch.equal(torch.get_rng_state(), before), "dropout draws what it would have drawn"
        assert not torch.equal(drawn(3).sort(0).values, drawn(4).sort(0).values)
        assert not torch.equal(drawn(3).sort(0).values, drawn(3, seed=2).sort(0).values)
        assert len(drawn(3).unique(dim=0)) == 8

    def test_what_cannot_be_trained_on(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(())

        class Counted(Stream):
            def __len__(self) -> int:
                return 20

        for stream in (Stream(), Counted()):
            with pytest.raises(ConfigError, match=r"dataset: \w+ has no length"):
                SampleLoader(stream, config())
        with pytest.raises(ConfigError, match="dataset: 7 samples; expected at least 8, train_batch_size"):
            SampleLoader(points(7), config())
        with pytest.raises(ConfigError, match="eval_dataset: 1 samples; expected at least 2, a micro-batch"):
            SampleLoader(points(1), config(), evaluates=True)
        loader = SampleLoader(TensorDataset(torch.zeros(8)), config())
        with pytest.raises(ConfigError, match=r"dataset: expected samples \(inputs, labels\)"):
            next(loader.micro_batches(loader.batch(0), 0))
