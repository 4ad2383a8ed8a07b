"""Families of models: modules, and tables of modules in their places."""

from weightsync.reference.families.attention import Attention, VisionAttention
from weightsync.reference.families.basic import MLP, GatedMLP, Norm, Vocabulary, Whole, padded_vocab
from weightsync.reference.families.experts import Experts, Router
from weightsync.reference.families.hybrid import NemotronH, Qwen3Next
from weightsync.reference.families.mla import LatentAttention
from weightsync.reference.families.moe import DeepSeek, Qwen3Moe
from weightsync.reference.families.places import Decoder
from weightsync.reference.families.recurrent import GatedDeltaNet, Mamba
from weightsync.reference.families.vision import Qwen3VL, VisionTower

__all__ = [
    "MLP",
    "Attention",
    "Decoder",
    "DeepSeek",
    "Experts",
    "GatedDeltaNet",
    "GatedMLP",
    "LatentAttention",
    "Mamba",
    "NemotronH",
    "Norm",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3VL",
    "Router",
    "VisionAttention",
    "VisionTower",
    "Vocabulary",
    "Whole",
    "padded_vocab",
]
