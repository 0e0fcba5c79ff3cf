"""In which number formats a run computes: autocast, loss scaling, FP8, quantization-aware training."""

from .autocast import autocast, matmul_precision
from .exclusions import check_exclusive
from .fp8 import convert_to_fp8, fp8_share_of
from .qat import convert_qat, prepare_qat
from .qat_artifact import export_qat, export_qat_checkpoint, load_quantized
from .recipes import FP8_RECIPES, QAT_RECIPES, QATRecipe
from .report import ConversionReport
from .scaler import LossScaler, build_scaler

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
