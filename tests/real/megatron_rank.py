"""One TP rank of a small Megatron model on gloo: ``python megatron_rank.py RANK WORLD FOLDER``.

Megatron's groups are global to a process, so every rank is one. A rank writes what it holds to
``FOLDER/RANK.pt``; ``test_megatron.py`` reads all ranks' files and imports nothing of Megatron. Start it with
``-W ignore``: without Transformer Engine and Apex Megatron's imports say a lot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.clip_grads import count_zeros_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, dot_product_attention
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.attributes import HANDLES, TP_ATTRIBUTES
from weightsync.reference.errors import AttributeMismatch
from weightsync.reference.params import backfill, fresh_copy, read
from weightsync.reference.snapshot import SnapshotSlots
from weightsync.reference.steps import run

TABLE = layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS
VOCAB, TOKENS = 64, 8


class OnCpu(TorchFunctionMode):
    """Megatron's norms allocate on the GPU by name; here they get the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return func(*args, **named)


def expert_sizes(world: int) -> tuple[int, int]:
    """Sizes of expert tensor parallelism and of expert parallelism on a TP group of ``world``."""
    expert_parallel = 2 if world > 1 else 1
    return world // expert_parallel, expert_parallel


def gpt_config(world: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        tensor_model_parallel_size=world,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )


def layer_config(
    world: int, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False
) -> ModelParallelConfig:
    expert_tp, expert_parallel = expert_sizes(world)
    return ModelParallelConfig(
        tensor_model_parallel_size=world,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )


def gpt(world: int) -> GPTModel:
    """Gated, tied, with biases; the same weights whatever the world, since the CPU draws whole ones."""
    torch.manual_seed(0)
    return GPTModel(
        config=gpt_config(world),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        share_embeddings_and_output_weights=True,
    )


def single_layers(world: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every kind of tensor-parallel layer by itself: its parameters, and the whole weights that it was cut from."""
    torch.manual_seed(1)
    common = {"config": layer_config(world, dtype), "init_method": torch.nn.init.normal_}
    linear = {"bias": True, "skip_bias_add": False, "keep_master_weight_for_test": True}
    made = {
        "column": layers.ColumnParallelLinear(8, 16, gather_output=False, **common, **linear),
        "gated": layers.ColumnParallelLinear(8, 16, gather_output=False, stride=2, **common, **linear),
        "row": layers.RowParallelLinear(16, 8, input_is_parallel=True, **common, **linear),
        "expert column": layers.ColumnParallelLinear(
            8, 16, gather_output=False, is_expert=True, **common, **linear
        ),
        "expert row": layers.RowParallelLinear(
            16, 8, input_is_parallel=True, is_expert=True, **common, **(linear | {"skip_bias_add": True})
        ),
    }
    params = {
        f"{name}.{kind}": param for name, layer in made.items() for kind, param in layer.named_parameters()
    }
    masters = {f"{name}.weight": layer.master_weight for name, layer in made.items()}
    embedding = layers.VocabParallelEmbedding(32, 8, **common)
    return params | {"embedding.weight": embedding.weight}, masters


def after_every_hop(live: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """Copies of all parameters by each hop of ours, one from the other; the ledger has looked at each."""
    ledger = AttributeLedger(live)
    slots = SnapshotSlots({name: param.dtype for name, param in live.items()})
    run(slots.write(0, live))
    hops: dict[str, Mapping[str, Tensor]] = {"snapshot": slots.tensors(0)}
    hops["fp32 master"] = {n: fresh_copy(t, dtype=torch.float32) for n, t in hops["snapshot"].items()}
    hops["move"] = {n: fresh_copy(t, device="meta") for n, t in hops["fp32 master"].items()}
    before = live
    for hop, made in hops.items():
        ledger.check(hop, made, moved_from=before)
        before = made
    return hops


def lost_by_megatrons_master(live: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """What our ledger finds after Megatron's own recipe for a fp32 master, as its mixed optimizer does it."""
    masters = {}
    for name, param in live.items():
        masters[name] = param.detach().clone().float()
        layers.copy_tensor_model_parallel_attributes(masters[name], param)
        if hasattr(param, "shared"):
            masters[name].shared = param.shared
    try:
        AttributeLedger(live).check("Megatron's fp32 master", masters)
    except AttributeMismatch as error:
        return [tuple(found) for found in error.findings]
    return []


def filled_alike(live: Mapping[str, Tensor]) -> list[str]:
    """Names on which our ``backfill`` and Megatron's helper for defaults do not agree."""
    differing = []
    for name, param in live.items():
        theirs = fresh_copy(param)
        layers.set_defaults_if_not_set_tensor_model_parallel_attributes(theirs)
        ours = backfill(
            fresh_copy(param), param, name, replicated=not hasattr(param, "tensor_model_parallel")
        )
        if any(getattr(ours, key) != getattr(theirs, key) for key in TABLE):
            differing.append(name)
    return differing


def setter_refuses_a_second_call() -> bool:
    tensor = torch.zeros(2)
    layers.set_tensor_model_parallel_attributes(tensor, True, 0, 1)
    try:
        layers.set_tensor_model_parallel_attributes(tensor, True, 0, 1)
    except AssertionError:
        return True
    return False


def speaks(params: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether Megatron counts each parameter on this rank, in the group that its optimizer would pass."""
    dense, expert = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )
    return {
        name: layers.param_is_not_tensor_parallel_duplicate(
            param, dense if getattr(param, "allreduce", True) else expert
        )
        for name, param in params.items()
    }


def backward(model: GPTModel) -> None:
    """Real gradients of one batch, equal on all TP ranks as far as parameters are."""
    tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7 % VOCAB
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    future = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    # Attention asks for the GPU's number and generator; without dropout nothing draws from the generator.
    tracker = SimpleNamespace(get_cuda_rng_tracker=lambda: SimpleNamespace(fork=nullcontext))
    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(dot_product_attention, "tensor_parallel", tracker),
    ):
        model(tokens, positions, future, labels=tokens.roll(-1, 1)).mean().backward()


def statistics(params: Sequence[Parameter]) -> dict[str, float]:
    """Norms and zeros as Megatron's optimizer gets them, over its model-parallel group."""
    optimizer = SimpleNamespace(
        get_parameters=lambda: params,
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
    )
    grads = MegatronOptimizer.get_main_grads_for_grad_norm(optimizer)
    group = parallel_state.get_model_parallel_group()
    with OnCpu():
        return {
            **{
                f"norm {p}": get_grad_norm_fp32(grads, p, grad_stats_parallel_group=group) for p in (1.0, 2.0)
            },
            "norm inf": get_grad_norm_fp32(grads, float("inf"), grad_stats_parallel_group=group),
            "zeros": count_zeros_fp32(list(params), group),
        }


def reduction(rank: int, world: int) -> dict[str, Any]:
    """Gradients before and after Megatron's reduction of what is replicated, on a sequence-parallel model."""
    settings = SimpleNamespace(sequence_parallel=world > 1, qk_layernorm=False)
    model = Module()
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    options = {
        "bias": True,
        "skip_bias_add": False,
        "init_method": torch.nn.init.normal_,
        "config": layer_config(world, sequence_parallel=world > 1),
    }
    model.column = layers.ColumnParallelLinear(8, 16, gather_output=False, **options)
    model.row = layers.RowParallelLinear(16, 8, input_is_parallel=True, **options)
    model.helper = Parameter(torch.zeros(3))
    model.helper.average_gradients_across_tp_domain = True
    model.plain = Parameter(torch.zeros(3))
    generator = torch.Generator().manual_seed(rank)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    params = dict(model.named_parameters())
    before = {name: param.grad.clone() for name, param in params.items()}
    _allreduce_non_tensor_model_parallel_grads([model], settings)
    return {"params": params, "before": before, "after": {name: param.grad for name, param in params.items()}}


def main(rank: int, world: int, folder: Path) -> None:
    """Build, copy, differentiate, and write everything down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    expert_tp, expert_parallel = expert_sizes(world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tp,
    )
    model = gpt(world)
    live = dict(model.named_parameters())
    layer_params, masters = single_layers(world, torch.bfloat16)
    every = {f"gpt.{name}": param for name, param in live.items()} | layer_params
    hops = after_every_hop(every)
    backward(model)
    said = {
        "table": TABLE,
        "unknown": sorted(
            {key for param in every.values() for key in vars(param)} - set(TP_ATTRIBUTES) - set(HANDLES)
        ),
        "live": every,
        "copies": hops["snapshot"],
        "attributes": {
            hop: {name: dict(read(tensor).values) for name, tensor in params.items()}
            for hop, params in {"live": every, **hops}.items()
        },
        "masters": masters,
        "speaks": speaks(every),
        "expert rank": parallel_state.get_expert_tensor_parallel_rank(),
        "expert tp": expert_tp,
        "lost": lost_by_megatrons_master(every),
        "filled differently": filled_alike(every),
        "setter refuses": setter_refuses_a_second_call(),
        "grads": {name: param.grad for name, param in live.items()},
        "statistics": statistics(list(live.values())),
        "reduction": reduction(rank, world),
    }
    torch.save(said, folder / f"{rank}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
