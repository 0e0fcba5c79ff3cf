"""In which number formats a run computes: autocast, loss scaling, FP8, quantization-aware training."""

from ..arguments.choices import FP8_RECIPES, QAT_RECIPES, QATRecipe
from .autocast import LossScaler, autocast, build_scaler, matmul_precision
from .fp8 import convert_to_fp8, fp8_share_of
from .layers import ConversionReport, check_exclusive
from .qat import convert_qat, export_qat, export_qat_checkpoint, load_quantized, prepare_qat

__all__ = [
    "ConversionReport",
    "FP8_RECIPES",
    "LossScaler",
    "QATRecipe",
    "QAT_RECIPES",
    "autocast",
    "build_scaler",
    "check_exclusive",
    "convert_qat",
    "convert_to_fp8",
    "export_qat",
    "export_qat_checkpoint",
    "fp8_share_of",
    "load_quantized",
    "matmul_precision",
    "prepare_qat",
]
