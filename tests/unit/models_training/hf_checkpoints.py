"""Small checkpoints of every family, saved by transformers; and OpenCLIP's form of a CLIP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

WIDTH, LAYERS, HEADS, INNER = 16, 3, 2, 24
SIDE, PATCH, PROJECTION = 12, 4, 8
CLIP_TOKENS, SIGLIP_TOKENS, ROBERTA_PLACES = 20, 12, 40
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CLIP_VOCABULARY = [*BYTES, *(f"{b}</w>" for b in BYTES), "a", "<|startoftext|>", "<|endoftext|>"]
SIGLIP_WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "green", "blue", "square", "of", "picture")
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
PICTURE: dict[str, Any] = SIZES | {"image_size": SIDE, "patch_size": PATCH}


def shaken(model: Any, seed: int = 0) -> Any:
    """The model in inference mode with weights large enough for every part to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator) * 0.3
            value.copy_(noise + 1 if "norm" in name.lower() and name.endswith("weight") else noise)
    return model.eval()


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def change_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file; a field whose change is `...` goes."""
    told = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in told.items() if value is not ...})


def write_processor(folder: Path, kind: str, **changes: object) -> None:
    """preprocessor_config.json of a kind of image processor, of the small side."""
    told: dict[str, Any] = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48, 0.45, 0.4],
        "image_std": [0.26, 0.25, 0.27],
    }
    if kind == "CLIP":
        told |= {"size": {"shortest_edge": SIDE}, "do_center_crop": True}
        told["crop_size"] = {"height": SIDE, "width": SIDE}
    write_json(folder / "preprocessor_config.json", told | changes)


def _ids(words: list[str] | tuple[str, ...]) -> dict[str, int]:
    return {word: i for i, word in enumerate(dict.fromkeys(words))}


def write_clip_vocabulary(folder: Path) -> None:
    """vocab.json and merges.txt of bytes, and tokenizer.json of the same."""
    write_json(folder / "vocab.json", _ids(CLIP_VOCABULARY))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def clip_end() -> int:
    return len(_ids(CLIP_VOCABULARY)) - 1


def make_clip(folder: Path, *, legacy: bool = False, tokenizer: bool = True) -> Any:
    """A CLIP of both towers; `legacy` says the wrong end token, as the first checkpoints do."""
    import transformers

    end = clip_end()
    text = SIZES | {
        "vocab_size": end + 1,
        "max_position_embeddings": CLIP_TOKENS,
        "bos_token_id": end - 1,
        "eos_token_id": 2 if legacy else end,
    }
    config = transformers.CLIPConfig(
        text_config=text, vision_config=PICTURE, projection_dim=PROJECTION
    )
    model = shaken(transformers.CLIPModel(config))
    model.save_pretrained(folder)
    write_processor(folder, "CLIP")
    if tokenizer:
        write_clip_tokenizer(folder)
    return model


def make_clip_vision(folder: Path) -> Any:
    """A CLIP's vision tower with its projection, saved alone."""
    import transformers

    config = transformers.CLIPVisionConfig(**PICTURE, projection_dim=PROJECTION)
    model = shaken(transformers.CLIPVisionModelWithProjection(config))
    model.save_pretrained(folder)
    write_processor(folder, "CLIP")
    return model


def write_clip_tokenizer(folder: Path) -> None:
    """tokenizer.json by transformers' own tokenizer of the same vocabulary."""
    import transformers

    write_clip_vocabulary(folder)
    own = transformers.CLIPTokenizer(vocab=_ids(CLIP_VOCABULARY), merges=[])
    own.backend_tokenizer.save(str(folder / "tokenizer.json"))


def make_siglip(folder: Path, *, lowers: bool = True) -> Any:
    """A SigLIP of both towers; `lowers`: tokenizer.json lower-cases by itself."""
    import transformers

    text = SIZES | {
        "vocab_size": len(SIGLIP_WORDS),
        "max_position_embeddings": SIGLIP_TOKENS,
        "projection_size": WIDTH,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    config = transformers.SiglipConfig(text_config=text, vision_config=PICTURE)
    model = shaken(transformers.SiglipModel(config))
    model.save_pretrained(folder)
    write_processor(folder, "Siglip")
    made = Tokenizer(models.WordLevel(_ids(SIGLIP_WORDS), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    if lowers:
        made.normalizer = normalizers.Lowercase()
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "GemmaTokenizer", "do_lower_case": True, "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", told)
    return model


def make_vit(folder: Path, kind: str = "ViTModel", **changes: object) -> Any:
    """A ViT or DeiT of a class of transformers."""
    import transformers

    family = "DeiT" if kind.startswith("DeiT") else "ViT"
    config = getattr(transformers, f"{family}Config")(**(PICTURE | changes))
    model = shaken(getattr(transformers, kind)(config))
    model.save_pretrained(folder)
    write_processor(folder, family, do_center_crop=False)
    return model


def make_roberta(folder: Path, *, tokenizer: bool = True) -> Any:
    """A RoBERTa with a vocabulary of bytes."""
    import transformers

    words = _ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *BYTES])
    config = transformers.RobertaConfig(
        **SIZES,
        vocab_size=len(words),
        max_position_embeddings=ROBERTA_PLACES,
        type_vocab_size=1,
    )
    model = shaken(transformers.RobertaModel(config))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_json(folder / "vocab.json", words)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    if tokenizer:
        own = transformers.RobertaTokenizer(vocab=words, merges=[])
        own.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return model


def make_open_clip(folder: Path, clip: Path, *, pickled: bool = True) -> None:
    """The CLIP of `clip` in OpenCLIP's form: names, fused matrices, turned projections."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = _open_names(load_file(clip / "model.safetensors"))
    if pickled:
        torch.save(weights, folder / "open_clip_pytorch_model.bin")
    else:
        save_file(weights, folder / "open_clip_model.safetensors")
    vision = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "layers": LAYERS,
        "width": WIDTH,
        "head_width": WIDTH // HEADS,
        "mlp_ratio": INNER / WIDTH,
    }
    text = {
        "context_length": CLIP_TOKENS,
        "vocab_size": clip_end() + 1,
        "width": WIDTH,
        "heads": HEADS,
        "layers": LAYERS,
        "mlp_ratio": INNER / WIDTH,
    }
    model = {"embed_dim": PROJECTION, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    scaled = {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.25, 0.27]}
    prepared = scaled | {"interpolation": "bicubic", "resize_mode": "shortest"}
    told = {"model_cfg": model, "preprocess_cfg": prepared}
    write_json(folder / "open_clip_config.json", told)
    (folder / "tokenizer.json").write_bytes((clip / "tokenizer.json").read_bytes())


def _open_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {"logit_scale": weights["logit_scale"]}
    for theirs, side, kind in (("vision_model", "visual.", "v"), ("text_model", "", "t")):
        for layer in range(LAYERS):
            old, new = f"{theirs}.encoder.layers.{layer}.", f"{side}transformer.resblocks.{layer}."
            for part in ("weight", "bias"):
                thirds = [weights[f"{old}self_attn.{x}_proj.{part}"] for x in "qkv"]
                named[f"{new}attn.in_proj_{part}"] = torch.cat(thirds)
                pairs = {
                    "self_attn.out_proj": "attn.out_proj",
                    "layer_norm1": "ln_1",
                    "layer_norm2": "ln_2",
                    "mlp.fc1": "mlp.c_fc",
                    "mlp.fc2": "mlp.c_proj",
                }
                for a, b in pairs.items():
                    named[f"{new}{b}.{part}"] = weights[f"{old}{a}.{part}"]
        names = _VISION if kind == "v" else _TEXT
        for a, b in names.items():
            named[f"{side}{b}"] = weights[f"{theirs}.{a}"]
    named["visual.proj"] = weights["visual_projection.weight"].T.contiguous()
    named["text_projection"] = weights["text_projection.weight"].T.contiguous()
    return named


_VISION = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.weight": "conv1.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.weight": "ln_pre.weight",
    "pre_layrnorm.bias": "ln_pre.bias",
    "post_layernorm.weight": "ln_post.weight",
    "post_layernorm.bias": "ln_post.bias",
}
_TEXT = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
