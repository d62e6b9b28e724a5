"""Small models of images and text, each with the processor of its kind, made in code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from models.derived.proof import roughen
from tests.golden_vision import folder as golden_folder

SIDE, PATCH = 32, 8  # of a tower's images, in pixels
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
SQUARE = {"height": SIDE, "width": SIDE}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 384, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"text_config": {"model_type": "llama", **TEXT}}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
GRID_TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
GLM_TOWER = GRID_TOWER | {"hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40, "image_size": SIDE}
GRID_IMAGES = {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": 16**2, "longest_edge": 64**2}}
IMAGE = {"image_token": "<image>"}
MISTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
SPLIT_TOKENS = {**IMAGE, "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
SPLIT_TOKENS |= {"end_of_utterance_token": "<end_of_utterance>", "first_part": "<row_1_col_1>"}
SIZES = ((90, 40), (37, 61))  # of images, width and height


class MadeKind(NamedTuple):
    """How a kind of model is made.

    Attributes:
        config: of the whole model.
        processor: transformers' class, and its settings.
        images: the class of the image processor, and its settings.
        tokens: those that the tokenizer has by a name; `image_token`'s place features take, or that of `taken`.
        both_ways: the kinds of attention in which the tokens of an image see each other both ways.
        most: images in a record, where the model takes no more.
        model_type: where it is not the name of the kind.
    """

    config: dict[str, Any]
    processor: tuple[str, dict[str, Any]]
    images: tuple[str, dict[str, Any]]
    tokens: dict[str, str] = IMAGE
    taken: str = "image_token"
    both_ways: tuple[str, ...] = ()
    most: int = len(SIZES)
    model_type: str = ""

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image."""
        return self.tokens.get("image_token", self.tokens[self.taken])


KINDS = {
    "llava_next": MadeKind(
        {**LLAMA, "vision_config": {"model_type": "clip_vision_model", **TOWER}, "image_grid_pinpoints": PINPOINTS},
        (
            "LlavaNextProcessor",
            {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        (
            "LlavaNextImageProcessor",
            {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        ),
    ),
    "llava_onevision": MadeKind(
        {**LLAMA, "vision_config": {"model_type": "siglip_vision_model", **TOWER}, "image_grid_pinpoints": PINPOINTS},
        (
            "LlavaOnevisionProcessor",
            {"num_image_tokens": (SIDE // PATCH) ** 2, "vision_feature_select_strategy": "full"},
        ),
        ("LlavaOnevisionImageProcessor", {"size": SQUARE, "image_grid_pinpoints": PINPOINTS}),
        most=1,
    ),
    "pixtral": MadeKind(
        {
            **LLAMA,
            "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 12},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        ("PixtralProcessor", {"patch_size": PATCH}),
        ("PixtralImageProcessor", {"patch_size": {"height": PATCH, "width": PATCH}, "size": {"longest_edge": SIDE}}),
        MISTRAL_TOKENS,
        model_type="llava",
    ),
    "internvl": MadeKind(
        {
            **LLAMA,
            "vision_config": {**TOWER, "image_size": [SIDE] * 2, "patch_size": [PATCH] * 2},
            "image_seq_length": 4,
        },
        ("InternVLProcessor", {"image_seq_length": 4}),
        ("GotOcr2ImageProcessor", {"size": SQUARE, "max_patches": 4, "crop_to_patches": True}),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG>",
            "video_token": "<v>",
        },
        "context_image_token",
    ),
    "aya_vision": MadeKind(
        {**LLAMA, "vision_config": {"model_type": "siglip_vision_model", **TOWER}},
        (
            "AyaVisionProcessor",
            {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2, "img_patch_token": "<patch>"},
        ),
        ("GotOcr2ImageProcessor", {"size": SQUARE, "max_patches": 4, "crop_to_patches": True}),
        {**IMAGE, "patch_token": "<patch>"},
        "patch_token",
    ),
    "idefics3": MadeKind(
        {**LLAMA, "vision_config": TOWER},
        ("Idefics3Processor", {"image_seq_len": 4}),
        ("Idefics3ImageProcessor", {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}),
        SPLIT_TOKENS,
    ),
    "smolvlm": MadeKind(
        {**LLAMA, "vision_config": TOWER},
        ("SmolVLMProcessor", {"image_seq_len": 4}),
        ("SmolVLMImageProcessor", {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}),
        SPLIT_TOKENS,
    ),
    "idefics2": MadeKind(
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {**TOWER, "model_type": "idefics2_vision"},
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
        ("Idefics2Processor", {"image_seq_len": 4}),
        ("Idefics2ImageProcessor", {"size": {"shortest_edge": 16, "longest_edge": SIDE}}),
        {**IMAGE, "image_boundary_token": "<fake_token_around_image>"},
    ),
    "deepseek_vl": MadeKind(
        {**LLAMA, "vision_config": {"model_type": "siglip_vision_model", **TOWER}},
        ("DeepseekVLProcessor", {"num_image_tokens": 16}),
        ("DeepseekVLImageProcessor", {"size": SQUARE}),
    ),
    "vipllava": MadeKind(
        {
            **LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **TOWER},
            "vision_feature_layer": [-1, -2, 1],
        },
        (
            "LlavaProcessor",
            {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        ("CLIPImageProcessor", {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}),
    ),
    "lighton_ocr": MadeKind(
        {
            "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 8},
            "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 12},
        },
        ("LightOnOcrProcessor", {"patch_size": PATCH, "spatial_merge_size": 2}),
        (
            "PixtralImageProcessor",
            {"patch_size": {"height": 2 * PATCH, "width": 2 * PATCH}, "size": {"longest_edge": 2 * SIDE}},
        ),
        MISTRAL_TOKENS,
    ),
    "qwen2_vl": MadeKind(
        {
            "text_config": {"model_type": "qwen2_vl_text", **TEXT, **MROPE},
            "vision_config": {**GRID_TOWER, "embed_dim": 24, "hidden_size": 32},
        },
        ("Qwen2VLProcessor", {}),
        ("Qwen2VLImageProcessor", GRID_IMAGES),
    ),
    "glm4v": MadeKind(
        {"text_config": {"model_type": "glm4v_text", **TEXT, **MROPE}, "vision_config": GLM_TOWER},
        ("Glm4vProcessor", {}),
        ("Glm4vImageProcessor", GRID_IMAGES),
    ),
    "glm46v": MadeKind(
        {"text_config": {"model_type": "glm4v_text", **TEXT, **MROPE}, "vision_config": GLM_TOWER},
        ("Glm46VProcessor", {}),
        ("Glm46VImageProcessor", GRID_IMAGES),
    ),
    "gemma4": MadeKind(
        {
            "text_config": {
                "model_type": "gemma4_text",
                **TEXT,
                "head_dim": 8,
                "global_head_dim": 16,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                **TOWER,
                "head_dim": 12,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "standardize": True,
                "position_embedding_size": 256,
            },
            "audio_config": None,
        },
        ("Gemma4Processor", {"image_seq_length": 70}),
        ("Gemma4ImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
        {
            **IMAGE,
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
            "audio_token": "<a>",
        },
        both_ways=("sliding_attention",),
    ),
}

UNPLACED = "idefics2"  # whose processor changes the words beside an image
LIVING = [name for name in KINDS if name not in (UNPLACED, "aya_vision")]  # that model's own decoder is refused


def made(name: str, target: Path) -> Any:
    """Write the folder of a small model of a kind, with random weights and two images; return transformers' model."""
    kind = KINDS[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(golden_folder("llava") / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=kind.tokens,
    )
    template = (golden_folder("llava") / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template.replace("<image>", kind.placeholder)
    tokenizer.save_pretrained(target)
    token = tokenizer.convert_tokens_to_ids(kind.tokens[kind.taken])
    get_image_processor_class_from_name(f"{kind.images[0]}Pil")(**kind.images[1]).save_pretrained(target)
    processor = {"processor_class": kind.processor[0]} | kind.processor[1]
    (target / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind.model_type or name](**kind.config, image_token_id=token)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    roughen(model)
    model.save_pretrained(target)
    for number, size in enumerate(SIZES):
        pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(target / f"{number}.png")
    return model
