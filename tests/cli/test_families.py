"""Families in scenarios: their configuration keys, refusals that name them, and runs that check every bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from weightsync.cli.dry_run import dry_run
from weightsync.cli.model.checkpoint import load_weights
from weightsync.cli.model.config import CheckpointError, Keys
from weightsync.cli.model.families import FAMILIES, make_family, read_model
from weightsync.cli.model.synthetic import SyntheticWorkload
from weightsync.cli.result import make_result
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError, check
from weightsync.cli.scenario_files import load
from weightsync.cli.workload import deployment
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits

DECODER = {"vocab_size": 6, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPS = {**DECODER, "num_key_value_heads": 2, "head_dim": 2}
EXPERTS = {"moe_intermediate_size": 2, "num_experts": 2}
LATENT = {
    "intermediate_size": 4, "moe_intermediate_size": 2, "n_routed_experts": 2, "kv_lora_rank": 2,
    "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": GROUPS | EXPERTS,
    "deepseek_v2": DECODER | LATENT,
    "deepseek_v3": DECODER | LATENT | {"q_lora_rank": 2},
    "qwen3_vl": {
        "text_config": GROUPS | {"intermediate_size": 4},
        "vision_config": {
            "hidden_size": 4, "intermediate_size": 4, "depth": 1, "num_heads": 2, "out_hidden_size": 4,
            "num_position_embeddings": 3, "in_channels": 3, "temporal_patch_size": 2, "patch_size": 2,
            "spatial_merge_size": 2, "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_next": GROUPS | EXPERTS | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 2,
        "linear_value_head_dim": 2, "linear_conv_kernel_dim": 2, "full_attention_interval": 2,
        "shared_expert_intermediate_size": 2,
    },
    "nemotron_h": {name: value for name, value in GROUPS.items() if name != "num_hidden_layers"} | {
        "intermediate_size": 4, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 2, "mamba_head_dim": 2,
        "n_groups": 2, "ssm_state_size": 2, "conv_kernel": 2,
    },
}  # fmt: skip


def raw(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "dtype": "bfloat16", **SMALL[kind]}


def scenario(kind: str, **trainer: Any) -> dict[str, Any]:
    return {
        "name": kind,
        "model": {"family": raw(kind), "trainer_vocab_multiple": 2, "rollout_vocab_multiple": 4},
        "trainer": {"tp": 1, "pp": 2, "ep": 2, "etp": 1} | trainer,
        "rollouts": [{"tp": 2, "fused": True, "ep": 2}, {"tp": 1}],
        "workload": {"kind": "synthetic", "steps": 2, "density": 0.1},
        "policy": {"bucket_bytes": 4096},
    }


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_runs_and_every_rollout_holds_the_trainers_bits(kind: str) -> None:
    asked = check(scenario(kind), kind)
    planned = dry_run(asked)
    for backend in ("inprocess", "sim"):
        record = run(asked, backend)
        assert record is not None
        result = make_result(asked, record)
        assert result["verdict"]["ok"], [row for row in result["checks"] if not row["ok"]]
        assert [one["full_bytes"] + one["delta_bytes"] for one in result["updates"]] == [
            one.nbytes for one in planned.updates
        ]


class Recording(Mapping[str, Any]):
    """Configuration keys that remember which were asked for."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held, self.asked = held, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self.held[key]

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return key in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_keys_that_a_family_lists_are_those_that_it_reads(kind: str) -> None:
    flat = {"model_type": kind}
    for key, value in SMALL[kind].items():
        flat |= (
            {f"{key}.{inner}": one for inner, one in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    seen = Recording(flat)
    FAMILIES[kind].make(Keys("test", seen))
    common = {
        "model_type",
        "dtype",
        "torch_dtype",
        "text_config.dtype",
        "tie_word_embeddings",
        "attention_bias",
    }
    assert seen.asked - common == set(FAMILIES[kind].keys) - common


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "mixtral"},
            r"'model_type' is 'mixtral'; expected one of llama, .*qwen3_moe.*derive from",
        ),
        ({"num_expert": 4}, r"'num_expert' is not a key of 'qwen3_moe'; near names: num_experts"),
        ({"num_experts": 0}, "'num_experts' is 0; expected a positive integer"),
        ({"num_key_value_heads": 4}, "2 query heads and 4 key/value heads"),
        ({"mlp_only_layers": [0]}, "'mlp_only_layers' is .* every layer has experts"),
    ],
)
def test_keys_that_no_module_knows_are_refused_and_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as error:
        make_family(raw("qwen3_moe") | changes, "model.family")
    assert type(error.value).__name__ in ("CheckpointError", "PlanMismatch")
    data = scenario("qwen3_moe")
    data["model"]["family"] |= changes
    with pytest.raises(ScenarioError, match=said):
        check(data, "mine")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer": {"tp": 2, "ep": 4, "dp": 1}}, "expected a multiple of etp 2 .* ep 4; raise dp"),
        ({"trainer": {"pp": 2, "stages": [1]}}, r"stages are \[1\], expected 2 numbers of layers"),
        ({"rollouts": [{"tp": 2, "ep": 4}]}, "ep 4 does not divide tp 2"),
        ({"workload": {"kind": "train"}}, "trains dense decoders only; give a model.shape"),
        ({"workload": {"kind": "rl"}}, "needs a trainer of tensor-parallel ranks only"),
        ({"model": {"family": raw("qwen3_moe"), "shape": {}}}, "shape and family are both given"),
    ],
)
def test_layouts_and_workloads_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        check(scenario("qwen3_moe") | changes, "mine")


def test_overrides_reach_family_keys_and_stages() -> None:
    loaded = load("tiny-experts", ["model.family.num_experts=8", "trainer.stages=[0, 2]"])
    assert len(deployment(loaded).tensors) > len(deployment(load("tiny-experts")).tensors)
    assert loaded.trainer.stages == (0, 2)
    assert check(loaded.to_dict(), "again") == loaded
    dense = load("tiny-experts", ["model.shape.hidden_size=8"])
    assert (dense.model.family, type(deployment(dense).model)) == (None, ModelShape)


def test_a_folder_of_a_family_is_read_without_what_no_module_names(tmp_path: Path) -> None:
    config = raw("deepseek_v3") | {"rope_theta": 1e4, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path / "config.json")
    weights = SyntheticWorkload(model.tensors(), 0.0, 0).initial()
    save_file(
        weights | {"model.layers.2.embed_tokens.weight": weights["lm_head.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    found = load_weights(tmp_path, model)
    assert list(found) == list(weights)
    assert all(same_bits(found[name], tensor) for name, tensor in weights.items())
    asked = scenario("deepseek_v3")
    asked["model"] = {"checkpoint": str(tmp_path), "trainer_vocab_multiple": 2, "rollout_vocab_multiple": 4}
    record = run(check(asked, "folder"), "inprocess")
    assert record is not None
    assert make_result(check(asked, "folder"), record)["verdict"]["ok"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(CheckpointError, match="the trainer holds unquantised weights"):
        read_model(tmp_path / "config.json")
