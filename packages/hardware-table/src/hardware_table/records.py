"""What is known of one accelerator: an immutable record, with its peaks by number format."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPES: tuple[str, ...] = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp4", "int8")
"""Number formats, in the order in which they are listed."""

_SYNONYMS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float4": "fp4",
    "float4_e2m1fn_x2": "fp4",
    "nvfp4": "fp4",
}


def canonical_dtype(dtype: str) -> str:
    """Name a number format as the table does.

    Args:
        dtype: One of `DTYPES`, or a torch name such as `"bfloat16"` or `"torch.bfloat16"`, in any case.

    Returns:
        The member of `DTYPES`.

    Raises:
        TypeError: If `dtype` is not text.
        ValueError: If the name is not known.
    """
    if not isinstance(dtype, str):
        raise TypeError(f"dtype={dtype!r} must be text such as 'bf16'. For a torch dtype pass str(dtype).")
    name = dtype.strip().casefold().removeprefix("torch.")
    name = _SYNONYMS.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known. Use one of {', '.join(DTYPES)}.")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak of one accelerator in one number format, dense, in FLOP/s.

    Attributes:
        dtype: Number format, one of `DTYPES`.
        flops: The figure to use, in FLOP/s (integer operations per second for int8).
        published: What a source prints (or half of the sparse figure it prints), in FLOP/s. None where no
            source prints a figure, and for a scaled record.
        flops_per_cycle: FLOPs per cycle of one compute unit, one multiply-add being two. None where it is
            not known.
    """

    dtype: str
    flops: float
    published: float | None = None
    flops_per_cycle: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfiguration:
    """A memory size that an accelerator is sold with.

    Attributes:
        bandwidth: Peak memory bandwidth in bytes per second.
        gigabytes: Nominal capacity in GB. None where the name stands for one size only.
    """

    bandwidth: float
    gigabytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator as torch counts devices: for a two-die card, one die.

    Attributes:
        name: The device name; unique in the table. A few cards report a name that they share with others;
            their record is named after the product.
        aliases: Other names that torch reports for it. Records that share an alias differ in `units`.
        vendor: "NVIDIA", "AMD" or "Intel".
        category: "data centre", "workstation", "consumer" or "integrated".
        architecture: Such as "Hopper" or "CDNA3".
        chip: Such as "GH100" or "gfx942", where known.
        compute_capability: As torch reports it, such as "9.0". It does not determine the rate, and it is
            not unique: 9.0 is both the H100 and the MI250X.
        unit_kind: What a compute unit is: "SM", "CU", "EU" or "MME" (matrix multiplication engine).
        units: Number of compute units. None where it is not published.
        clock_ghz: Clock in GHz at which the peaks are stated. None where it is not published.
        clock_kind: Which clock that is: "boost", "tensor" (of the tensor cores, below boost),
            "back-solved" (from a published peak), "engine", "matrix", "maximum", "power mode", "unsure" or
            "unpublished".
        boost_ghz: SM boost clock (or the maximum that the device reports) where it is not `clock_ghz`.
        peaks: One entry per number format that the device's matrix units (for fp32: its plain cores) have.
        memory: The memory sizes with their bandwidth. Empty where unknown, and for a scaled record.
        source: Where the figures are from.
        references: The works that `source`, `why` and `note` refer to in square brackets.
        confidence: "measured" (published, and borne out by a public GEMM measurement), "published",
            "unchecked" (a vendor's figure not compared with the document again), "derived" or "uncertain".
        why: Why the figure is not the family's rate at the boost clock, or None where it is.
        note: What else a reader should know, or None.
        scaled_from: Unit count of the whole device if this record was scaled to fewer or more units.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    category: str
    architecture: str
    chip: str | None
    compute_capability: str | None
    unit_kind: str
    units: int | None
    clock_ghz: float | None
    clock_kind: str
    boost_ghz: float | None
    peaks: tuple[Peak, ...]
    memory: tuple[MemoryConfiguration, ...]
    source: str
    references: tuple[str, ...]
    confidence: str
    why: str | None
    note: str | None
    scaled_from: int | None = None

    def peak(self, dtype: str) -> Peak | None:
        """Give the peak in one number format.

        Args:
            dtype: One of `DTYPES` or a torch name for it.

        Returns:
            The peak, or None if the table has none for this device and format.

        Raises:
            ValueError: If `dtype` is not known.
        """
        wanted = canonical_dtype(dtype)
        return next((peak for peak in self.peaks if peak.dtype == wanted), None)

    def peak_flops(self, dtype: str = "bf16") -> float | None:
        """Give the peak in FLOP/s, dense, or None; see `peak`."""
        peak = self.peak(dtype)
        return None if peak is None else peak.flops

    def derived_flops(self, dtype: str = "bf16") -> float | None:
        """Compute units x FLOPs per cycle x clock, the check of the peak.

        FP32, which plain cores compute, and FP64 run at the SM boost clock, everything else at the clock of
        the matrix units: an H100 SXM computes FP64 at 1980 MHz, and BF16 at 1830 MHz.

        Args:
            dtype: One of `DTYPES` or a torch name for it.

        Returns:
            FLOP/s, or None where a factor is not known.

        Raises:
            ValueError: If `dtype` is not known.
        """
        peak = self.peak(dtype)
        if peak is None or peak.flops_per_cycle is None or self.units is None:
            return None
        clock = self.boost_ghz or self.clock_ghz if peak.dtype in ("fp32", "fp64") else self.clock_ghz
        return None if clock is None else self.units * peak.flops_per_cycle * clock * 1e9

    def memory_bandwidth(self, total_memory: int | None = None) -> float | None:
        """Give the memory bandwidth in bytes per second.

        Args:
            total_memory: Memory of the device in bytes, as torch reports it. Needed where cards of one name
                differ in memory.

        Returns:
            The bandwidth, or None if it is unknown or the size does not tell which card it is.
        """
        bandwidths = {entry.bandwidth for entry in self.memory}
        if len(bandwidths) == 1:
            return bandwidths.pop()
        if total_memory is None:
            return None
        return next((e.bandwidth for e in self.memory if _is_size(total_memory, e.gigabytes)), None)

    def scaled(self, units: int) -> Accelerator:
        """Give the record of a device of this kind that reports another number of compute units.

        This is how slices (MIG, compute partitions) and cut-down parts get their share of the peak. Their
        memory bandwidth is not known.

        Args:
            units: Number of compute units that the device reports.

        Returns:
            This record if the number is the same or the whole device's number is not published; else a
            record with each peak times `units / self.units`.
        """
        if self.units is None or units == self.units:
            return self
        share = units / self.units
        peaks = tuple(replace(peak, flops=peak.flops * share, published=None) for peak in self.peaks)
        note = f"Scaled from {self.units} to {units} {self.unit_kind}s. {self.note or ''}".rstrip()
        return replace(self, units=units, peaks=peaks, memory=(), note=note, scaled_from=self.units)


def _is_size(total_memory: int, gigabytes: float | None) -> bool:
    # Devices report less than the nominal size (reserved memory, GiB against GB): 15 % covers both.
    return gigabytes is not None and abs(total_memory / (gigabytes * 1e9) - 1) <= 0.15
