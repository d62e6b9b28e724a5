"""Load the processor of a model folder for images and text alone, from its files, without code of theirs.

transformers loads a processor as a whole, and its part for videos asks for torchvision, which has to fit torch to the
build, that for sound for settings that a folder need not have. What images need is made of numpy and Pillow, so those
parts are left out, whether torchvision is there or not: pixels are the same numbers everywhere, and what is installed
decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.terminal import reason_of
from data.errors import DataError

IMAGE_TOKEN = ("image_token_id", "image_token_index")  # in config.json: whose places features take
LEFT_OUT = ("video_processor", "feature_extractor")
# What a processor wants to be installed for videos alone: the name in its module.
OF_VIDEOS = {"SmolVLMProcessor": "num2words"}
NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # as transformers looks


def load_processor(folder: Path) -> Any:
    """Load a model's processor with the image processor that needs Pillow alone.

    Raises:
        DataError: there is none, or none that this transformers makes of images and text.
    """
    try:
        whole = _whole_class(_class_name(folder))
        with _without_videos(whole):
            options: dict[str, Any] = {"backend": "pil", "local_files_only": True, "trust_remote_code": False}
            made = _for_images(whole).from_pretrained(str(folder), **options)
        if not says_what_stands(whole):
            what = f"transformers' {whole.__name__} does not say which text stands for one image"
            raise ValueError(f"{what}; expected a model whose processor does")
        if made.image_processor.backend != "pil":  # transformers takes another where it has none
            raise ValueError(f"transformers has {type(made.image_processor).__name__} for torchvision alone")
        return made
    except DataError:
        raise
    except Exception as error:  # transformers raises many kinds here
        misfit = "; the installed torchvision does not fit torch: expected one that does, or none"
        hint = misfit if "torchvision::" in str(error) else ""
        raise DataError(f"{folder}: no usable processor of images: {reason_of(error)}{hint}") from None


def image_token_of(folder: Path) -> int | None:
    """Return the token in whose places features of images go; None for a model without one."""
    config = _read(folder / "config.json")
    return next((config[key] for key in IMAGE_TOKEN if type(config.get(key)) is int), None)


def _class_name(folder: Path) -> str:
    """Return the name of the processor's class, from the files or by the kind of the model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    said = [_read(folder / name) for name in NAMED_IN]
    names = [found["processor_class"] for found in said if found.get("processor_class")]
    model_type = _read(folder / "config.json").get("model_type")
    names += filter(None, [PROCESSOR_MAPPING_NAMES.get(model_type)])
    if not names or not (said[0] or said[1]):
        raise DataError(
            f"{folder}: no processor of images; expected preprocessor_config.json or processor_config.json of the model"
        )
    name = names[0]
    return str(name if isinstance(name, str) else name[0])


def _read(path: Path) -> dict[str, Any]:
    """Read a file of settings; an absent one has none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object of settings")
    return found


def says_what_stands(kind: Any) -> bool:
    """Return whether a processor says what it writes for one image, whatever the words beside it are."""
    from transformers.processing_utils import ProcessorMixin

    return kind.replace_image_token is not ProcessorMixin.replace_image_token


def _whole_class(name: str) -> Any:
    """Return transformers' class of this name."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    whole = _pixtral() if name == "PixtralProcessor" else processor_class_from_name(name)
    if whole is None:
        raise ValueError(f"transformers knows no {name}")
    return whole


def _for_images(whole: Any) -> Any:
    """Return a processor's class without its parts for videos and sound."""
    from transformers.processing_utils import ProcessorMixin

    every = whole.get_attributes()
    used = [part for part in every if part not in LEFT_OUT]

    class Used(ProcessorMixin):
        """Keep the parts that are used, whichever a processor hands on."""

        def __init__(self, *parts: Any, **named: Any) -> None:
            given = dict(zip(every, parts, strict=False)) | named
            super().__init__(**{part: value for part, value in given.items() if part in used or part not in every})

    def load(cls: Any, *folder: Any, **options: Any) -> list[Any]:
        loaded = dict(zip(used, whole._get_arguments_from_pretrained.__func__(cls, *folder, **options), strict=True))
        return [loaded.get(part) for part in every]  # in the places where the processor takes them

    own = {"get_attributes": classmethod(lambda cls: used), "_get_arguments_from_pretrained": classmethod(load)}
    return type(whole.__name__, (whole, Used), own)


@contextmanager
def _without_videos(whole: Any) -> Iterator[None]:
    """Let a processor be made without what it wants for videos alone, of which it only asks whether it is there."""
    module, name = sys.modules[whole.__module__], OF_VIDEOS.get(whole.__name__, "")
    if getattr(module, name, True):  # nothing is wanted, or it is there
        yield
        return
    setattr(module, name, whole)
    try:
        yield
    finally:
        setattr(module, name, None)


def _pixtral() -> Any:
    """Return Pixtral's processor, which transformers gives only beside torchvision.

    It takes a single function of the image processor that needs torchvision; the one that needs Pillow has the same.
    """
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    taken = f"{pil.__package__}.image_processing_pixtral"
    absent = taken not in sys.modules
    if absent:
        sys.modules[taken] = pil
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

        return PixtralProcessor
    finally:
        if absent:
            del sys.modules[taken]
