"""Images through a model's own processor: golden pixels, tokens and texts, sizes that are asked for, and refusals."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from data.errors import DataError
from data.images.image import Image
from data.images.pictures import Expansion, Pictures
from data.tokenized.tokenizer import load_tokenizer
from tests import golden_vision as golden
from tests.conftest import ROOT
from tests.golden_vision import NAMES, needs_golden


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_the_processor_for_pil(name: str) -> None:
    pictures, own = golden.pictures(name), AutoImageProcessor.from_pretrained(golden.folder(name), backend="pil")
    for number, sample in enumerate(golden.expected(name)["samples"]):
        images = golden.looked_at(name, sample["images"])
        for place, (image, known) in enumerate(zip(images, sample.get("pixel_values", []), strict=True)):
            made = pictures.tensors([image])
            values = made["pixel_values"]
            assert values.dtype == torch.float32
            assert list(values.shape)[-len(known["shape"]) :] == known["shape"]
            assert float(values.double().sum()) == pytest.approx(known["sum"], rel=1e-6)
            assert float(values.double().abs().sum()) == pytest.approx(known["abs_sum"], rel=1e-6)
            exact = golden.tensors(name).get(f"s{number}.pixel_values.{place}")
            if exact is not None:
                torch.testing.assert_close(values.reshape(exact.shape), exact, rtol=0, atol=1e-6)
            for key in ("image_grid_thw", "image_sizes"):
                if f"s{number}.{key}.{place}" in golden.tensors(name):
                    assert (
                        made[key].tolist() == golden.tensors(name)[f"s{number}.{key}.{place}"].reshape(1, -1).tolist()
                    )

    images = golden.looked_at(name, ["images/c.png", "images/a.png"])
    paths = [PIL.Image.open(image.path).convert("RGB") for image in images]
    options = {"patch_size": 16} if name == "mistral3" else {}  # that of a token, as the model's processor passes on
    known = own(paths, return_tensors="pt", **options)
    made = pictures.tensors(images)
    assert list(made) == [key for key in known if key in made]
    for key, tensor in made.items():
        assert torch.equal(tensor, known[key])


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_what_stands_for_an_image_gives_the_golden_ids(name: str) -> None:
    pictures, tokenizer = golden.pictures(name), load_tokenizer(golden.folder(name))
    for number, sample in enumerate(golden.expected(name)["samples"]):
        images = golden.looked_at(name, sample["images"])
        first, *rest = sample["rendered"].split(pictures.placeholder)
        text = first + "".join(pictures.expanded(image) + part for image, part in zip(images, rest, strict=True))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == golden.tensors(name)[f"s{number}.input_ids"].flatten().tolist()
        assert ids.count(pictures.image_token) == sum(image.tokens for image in images)
        if all(sample["image_tokens"]):
            assert [image.tokens for image in images] == sample["image_tokens"]


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_the_shape_is_known_without_pixels(name: str) -> None:
    (image,) = golden.looked_at(name, ["images/b.png"])
    made = golden.pictures(name).arrays([image])
    assert image.shape == {key: array.tolist() for key, array in made.items() if key != "pixel_values"}
    assert Image(*json.loads(json.dumps(image))) == image


@needs_golden
def test_processors_need_neither_torch_nor_torchvision(tmp_path: Path) -> None:
    """As where records are tokenized, which does without torch."""
    code = (
        "import sys; from pathlib import Path\n"
        "sys.modules['torch'] = None; sys.modules['torchvision'] = None\n"
        "from data.images.pictures import Expansion, Pictures\n"
        "for folder in sys.argv[1:]:\n"
        "    pictures = Pictures(Path(folder)); image = pictures.look(Path(folder, 'images/a.png'), Path('.'))\n"
        "    print(image.tokens, float(pictures.arrays([image])['pixel_values'].sum()))\n"
    )
    words = [sys.executable, "-c", code, *(str(golden.folder(name)) for name in NAMES)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stderr
    for name, line in zip(NAMES, ended.stdout.splitlines(), strict=True):
        (image,) = golden.looked_at(name, ["images/a.png"])
        tokens, total = line.split()
        assert int(tokens) == image.tokens
        assert float(total) == float(golden.pictures(name).arrays([image])["pixel_values"].sum())


@needs_golden
def test_a_torchvision_that_does_not_fit_is_said(tmp_path: Path) -> None:
    """As the one of a GPU's torch beside the one of a CPU's."""
    package, about = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from data.errors import DataError; from data.images.pictures import Expansion, Pictures\n"
        "try: Pictures(Path(sys.argv[2]))\n"
        "except DataError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(golden.folder("llava"))]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    (line,) = ended.stdout.splitlines()
    assert line.endswith("the installed torchvision does not fit torch: expected one that does, or none")


@needs_golden
@pytest.mark.parametrize(
    ("name", "limits", "tokens"),
    [
        ("qwen2_5_vl", (None, 800), (4, 4)),
        ("qwen2_5_vl", (1800, None), None),
        ("qwen3_5", (None, 800), (4, 4)),
        ("mistral3", (None, 1024), None),
    ],
)
def test_images_are_resized_as_asked(
    name: str, limits: tuple[int | None, int | None], tokens: tuple[int, int] | None
) -> None:
    pictures = Pictures(golden.folder(name), *limits)
    least, most = limits
    for path in ("images/a.png", "images/b.png"):
        image = pictures.look(golden.folder(name) / path, Path("unused"))
        whole = golden.looked_at(name, [path])[0]
        assert (image.tokens < whole.tokens) if most else (image.tokens > whole.tokens)
        if name.startswith("qwen"):
            _, rows, columns = image.shape["image_grid_thw"][0]
            area = rows * columns * 49
        else:
            area = math.prod(image.shape["image_sizes"][0])
        assert area <= (most or area)
        assert area >= (least or area)
        made = pictures.tensors([image])
        assert all(image.shape[key] == made[key].tolist() for key in image.shape)


@needs_golden
@pytest.mark.parametrize(
    ("name", "limits", "line"),
    [
        ("llava", (None, 800), "vision.max_pixels: CLIPImageProcessor resizes to what its own settings say"),
        ("gemma3", (800, None), "vision.min_pixels: Gemma3ImageProcessor resizes to what its own settings say"),
        ("mistral3", (800, None), "vision.min_pixels: PixtralImageProcessor resizes to what its own settings say"),
        ("qwen2_5_vl", (10_000, None), "vision.min_pixels: 10,000, and the processor's max_pixels is 2,048; expected"),
        ("qwen2_5_vl", (None, 10), "vision.max_pixels: 10, and the processor's min_pixels is "),
    ],
)
def test_other_sizes_than_a_model_takes_are_refused(
    name: str, limits: tuple[int | None, int | None], line: str
) -> None:
    with pytest.raises(DataError) as error:
        Pictures(golden.folder(name), *limits)
    assert str(error.value).startswith(line)


@needs_golden
def test_bytes_are_kept_once_as_they_are(tmp_path: Path) -> None:
    content = (golden.folder("llava") / "images/a.png").read_bytes()
    first = golden.pictures("llava").look(content, tmp_path)
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    assert first == golden.looked_at("llava", ["images/a.png"])[0]._replace(path=str(path))
    assert path.read_bytes() == content
    written = path.stat().st_mtime_ns
    assert golden.pictures("llava").look(content, tmp_path) == first
    assert path.stat().st_mtime_ns == written

    path.write_bytes(b"")  # as a power cut may leave it
    assert golden.pictures("llava").look(content, tmp_path) == first
    assert path.read_bytes() == content


@needs_golden
def test_a_file_that_was_changed_is_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    shutil.copy(golden.folder("llava") / "images/a.png", path)
    image = golden.pictures("llava").look(path, tmp_path)
    shutil.copy(golden.folder("llava") / "images/b.png", path)
    with pytest.raises(DataError) as error:
        golden.pictures("llava").tensors([image])
    line = "this image was changed since the records were read; expected the same file"
    assert str(error.value) == f"{path}: {line}"
    path.unlink()
    with pytest.raises(DataError, match="No such file or directory"):
        golden.pictures("llava").tensors([image])


@needs_golden
def test_a_shape_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "strip.png"
    PIL.Image.new("RGB", (2010, 10)).save(path)
    with pytest.raises(DataError) as error:
        golden.pictures("qwen3_vl").look(path, tmp_path)
    assert str(error.value).startswith(f"{path}: the model takes no image of 2010 x 10 pixels: absolute aspect ratio")


@needs_golden
@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {"preprocessor_config.json": None, "processor_config.json": None},
            "no processor of images; expected preprocessor_config.json or processor_config.json of the model",
        ),
        ({"processor_config.json": "{"}, "processor_config.json: cannot be read"),
        ({"processor_config.json": "[]"}, "processor_config.json: expected an object of settings"),
        (
            {"processor_config.json": '{"processor_class": "os.system"}'},
            "no usable processor of images: transformers knows no os.system",
        ),
        (
            {"config.json": '{"model_type": "llava"}'},
            "config.json: no image_token_id; expected a model of images and text",
        ),
    ],
)
def test_a_folder_without_what_is_needed_is_refused(tmp_path: Path, files: dict[str, str | None], line: str) -> None:
    for path in golden.folder("llava").glob("*.json*"):
        shutil.copy(path, tmp_path)
    for name, text in files.items():
        (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as error:
        Pictures(tmp_path)
    (said,) = str(error.value).splitlines()
    assert line in said
    assert str(tmp_path) in said


@needs_golden
def test_a_processor_that_transformers_has_for_torchvision_alone_is_refused(tmp_path: Path) -> None:
    for path in golden.folder("llava").glob("*.json*"):
        shutil.copy(path, tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    kind = {"image_processor_type": "Llama4ImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | kind))
    with pytest.raises(DataError) as error:
        Pictures(tmp_path)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}: no usable processor of images: ")
    assert "torchvision alone" in line or "Could not load any image processor class" in line  # where there is none


@needs_golden
def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    for path in golden.folder("llava").glob("*.json*"):
        shutil.copy(path, tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        kinds = {"AutoProcessor": "own.Own", "AutoImageProcessor": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
        (tmp_path / name).write_text(json.dumps(settings | {"auto_map": kinds}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    pictures = Pictures(tmp_path)
    assert pictures.placeholder == "<image>"
    assert not (tmp_path / "was_run").exists()


@needs_golden
def test_images_of_one_size_ask_the_processor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = Pictures(golden.folder("qwen2_5_vl"))
    asked: list[tuple[int, int]] = []
    ask = pictures._of_blank

    def counted(width: int, height: int) -> Expansion:
        asked.append((width, height))
        return ask(width, height)

    monkeypatch.setattr(pictures, "_of_blank", counted)
    found: list[Image] = []
    for number, colour in enumerate(("red", "green", "blue")):
        path = tmp_path / f"{number}.jpg"
        PIL.Image.new("RGB", (40, 30), colour).save(path)
        found.append(pictures.look(path, tmp_path))
    assert asked == [(40, 30)]
    assert len({image.digest for image in found}) == 3
    assert len({pictures.expanded(image) for image in found}) == 1
