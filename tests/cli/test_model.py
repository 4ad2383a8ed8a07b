from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weightsync.cli.model import data, decoder
from weightsync.cli.model.checkpoint import INDEX, load_checkpoint, make_checkpoint, seeded_weights
from weightsync.cli.model.config import CheckpointError, DecoderConfig, RopeScaling, read_config
from weightsync.cli.model.trainer import DemoTrainer
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits

SHAPE = ModelShape(
    vocab=259, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, head_dim=4, tied=True, qk_norm=True
)
CONFIG = DecoderConfig("qwen3", SHAPE)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64)


def config_of(kind: str, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> DecoderConfig:
    shape = replace(SHAPE, tied=tied, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", dtype=dtype)
    return DecoderConfig(kind, shape, rope_scaling=SCALING if kind == "llama" else None)


def lively(config: DecoderConfig) -> dict[str, Tensor]:
    """Weights far enough from their start that every term of the decoder shows in its output."""
    weights = seeded_weights(config, 1)
    for tensor in weights.values():
        tensor.mul_(6) if tensor.dim() > 1 else tensor.add_(torch.linspace(-0.4, 0.4, len(tensor)))
    return weights


def trainer_of(folder: Path, rank: int, tp: int, **options: Any) -> DemoTrainer:
    shape = read_config(folder / "config.json").shape
    return DemoTrainer(
        folder, rank, Deployment(shape, tp, (RolloutLayout(1, False),), 4096), seed=0, **options
    )


def rewrite(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", CONFIG, seed=0)


def test_a_made_folder_reads_back_bit_for_bit(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    assert loaded.config == CONFIG
    assert loaded.unused == ()
    assert list(loaded.weights) == [meta.name for meta in SHAPE.tensors()]
    made = seeded_weights(CONFIG, 0)
    assert all(same_bits(made[name], tensor) for name, tensor in loaded.weights.items())
    other = seeded_weights(CONFIG, 1)
    assert not same_bits(other["model.embed_tokens.weight"], made["model.embed_tokens.weight"])


def test_one_file_and_several_under_an_index_are_the_same(folder: Path, tmp_path: Path) -> None:
    several = make_checkpoint(tmp_path / "several", CONFIG, seed=0, files=3)
    assert len(list(several.glob("*.safetensors"))) == 3
    one, three = load_checkpoint(folder), load_checkpoint(several)
    assert all(same_bits(one.weights[name], three.weights[name]) for name in one.weights)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_type", "mamba", "one of llama, mistral, qwen2, qwen3"),
        ("hidden_size", None, "is missing"),
        ("hidden_size", "wide", "a positive integer"),
        ("num_hidden_layers", 0, "a positive integer"),
        ("num_key_value_heads", 3, "a divisor of num_attention_heads, which is 4"),
        ("head_dim", 5, "an even number"),
        ("head_dim", None, "is missing"),
        ("hidden_act", "gelu", "SwiGLU"),
        ("attention_bias", True, "biases"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("rope_scaling", {"rope_type": "yarn"}, "'default' or 'llama3'"),
        ("rope_theta", -1, "a positive number"),
        ("torch_dtype", "int8", "one of bfloat16"),
        ("quantization_config", {"bits": 4}, "unquantised"),
        ("use_sliding_window", True, "the whole prefix"),
    ],
)
def test_a_wrong_configuration_names_its_key(folder: Path, key: str, value: Any, words: str) -> None:
    path = rewrite(folder, **{key: value})
    with pytest.raises(CheckpointError, match=key) as error:
        read_config(path)
    assert words in str(error.value)


def test_newer_configurations_keep_rope_and_dtype_under_other_names(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_theta"], raw["torch_dtype"]
    raw["dtype"] = "bfloat16"
    raw["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_config(folder / "config.json") == replace(CONFIG, rope_theta=5e5, rope_scaling=SCALING)


def test_tensors_that_do_not_fit_the_configuration_are_named(folder: Path) -> None:
    rewrite(folder, num_hidden_layers=3)
    with pytest.raises(
        CheckpointError, match=r"lacks 11 of 35 tensors, first 'model\.layers\.2\.input_layernorm"
    ):
        load_checkpoint(folder)
    rewrite(folder, num_hidden_layers=2, tie_word_embeddings=False)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight.*is 'tie_word_embeddings' in config\.json right"
    ):
        load_checkpoint(folder)
    rewrite(folder, tie_word_embeddings=True, vocab_size=300)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight' has shape \[259, 16\]; expected \[300, 16\]"
    ):
        load_checkpoint(folder)
    rewrite(folder, vocab_size=259, torch_dtype="float16")
    with pytest.raises(CheckpointError, match=r"is torch\.bfloat16; expected torch\.float16"):
        load_checkpoint(folder)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", CONFIG, seed=0, files=2)
    make_checkpoint(tmp_path / "outside", CONFIG, seed=0)
    index = json.loads((folder / INDEX).read_text())
    for file in (
        "../outside/model.safetensors",
        str(tmp_path / "outside/model.safetensors"),
        "absent.safetensors",
    ):
        index["weight_map"]["model.norm.weight"] = file
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="which is no file of this folder"):
            load_checkpoint(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="'weight_map' is missing"):
        load_checkpoint(folder)


def test_a_stored_tied_head_must_equal_the_embedding_and_strangers_are_reported(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.rotary.inv_freq"] = torch.ones(2)
    save_file(weights, file)
    assert load_checkpoint(folder).unused == ("model.rotary.inv_freq",)
    weights["lm_head.weight"][3, 1] = 7
    save_file(weights, file)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_checkpoint(folder)


def test_broken_folders_say_what_is_missing(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds 0 safetensors files"):
        load_checkpoint(folder)


# Last token's first four logits under transformers 5.24.0, float32, eager attention, of `lively` weights.
RECORDED = {
    ("qwen3", True): [0.094392, -0.269598, -0.833908, -0.982048],
    ("qwen3", False): [-0.686127, -0.248517, 0.90112, 0.452377],
    ("llama", True): [0.080634, -0.226996, -0.581531, -0.78958],
    ("llama", False): [-0.656264, -0.142265, 0.77285, 0.460092],
    ("qwen2", True): [0.422021, 0.018206, -0.689577, -1.241343],
    ("qwen2", False): [-0.489392, 0.311048, 0.45789, 0.248143],
}


@pytest.mark.parametrize(
    ("kind", "tied"), [(k, t) for k in ("qwen3", "llama", "qwen2") for t in (True, False)]
)
def test_logits_equal_those_recorded_from_transformers(kind: str, tied: bool) -> None:
    config = config_of(kind, tied=tied)
    tokens = (torch.arange(48)[None] * 37) % 259
    with torch.no_grad():
        scores = decoder.logits(config, lively(config), tokens)
    torch.testing.assert_close(scores[0, -1, :4], torch.tensor(RECORDED[kind, tied]), rtol=1e-4, atol=1e-5)


def test_attention_is_causal_and_rotation_is_relative() -> None:
    config = config_of("qwen3")
    weights = lively(config)
    tokens = torch.randint(259, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 259
    before, after = decoder.logits(config, weights, tokens), decoder.logits(config, weights, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    frequencies = decoder.rotary_frequencies(config)
    q, k = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    turned_q = decoder.rotate(q.expand(1, 9, 1, 4), frequencies)[0, :, 0]
    turned_k = decoder.rotate(k.expand(1, 9, 1, 4), frequencies)[0, :, 0]
    torch.testing.assert_close(turned_q[2] @ turned_k[0], turned_q[8] @ turned_k[6])


def test_the_text_gives_batches_that_depend_on_seed_and_step_only() -> None:
    text = data.shipped_text()
    assert 5_000 < len(text.encode()) < 8_000
    stream = data.token_stream(Path("no-such-folder"), 259)
    batches = data.Batches(stream, batch=3, tokens=8, seed=5)
    assert batches.at(2).shape == (3, 9)
    assert torch.equal(batches.at(2), data.Batches(stream, 3, 8, 5).at(2))
    assert not torch.equal(batches.at(2), batches.at(3))
    assert not torch.equal(batches.at(2), data.Batches(stream, 3, 8, 6).at(2))
    row = bytes(batches.at(1)[0].tolist())
    assert row in text.encode()


def test_tokens_outside_of_the_vocabulary_and_short_texts_are_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="vocab_size"):
        data.token_stream(folder, 100)
    with pytest.raises(CheckpointError, match="3 tokens, expected more than the 64"):
        trainer_of(folder, 0, 1, lr=1e-3, text="abc")


def test_a_tokenizer_of_the_folder_is_used(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"the": 0, "water": 1, "gate": 2, "[UNK]": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(folder / "tokenizer.json"))
    assert data.token_stream(folder, 4, "the gate the water boat").tolist() == [0, 2, 0, 1, 3]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json gives token 3"):
        data.token_stream(folder, 3, "boat")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        data.token_stream(folder, 4, "boat")
