"""NVIDIA's catalogue of XID errors: what each means, and what is to be done at once.

Source: "Analyzing Xid Errors with the Xid Catalog", table 1, columns "Description" and "Resolution Bucket
(Immediate Action)", for A100 and newer (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html); codes
that it calls unused are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

XidMeaning: TypeAlias = Literal["hardware", "memory", "application", "driver", "another", "unknown"]


@dataclass(frozen=True)
class XidError:
    """One kind of XID error.

    Attributes:
        code: Its number.
        text: What it is.
        action: The catalogue's immediate action, such as "RESET_GPU"; None where it gives none.
        meaning: "hardware": the GPU or its links have to be reset, restarted or looked at. "memory": an error
            of the memory that the GPU dealt with itself. "application": as a rule the application's fault, to
            be restarted. "driver": to be ignored as a rule. "another": it follows another error, which it
            hides where only the last one is told. "unknown": not in the catalogue.
    """

    code: int
    text: str
    action: str | None
    meaning: XidMeaning

    @property
    def told_action(self) -> str:
        """The catalogue's action in brackets, or nothing."""
        return f" (NVIDIA: {self.action})" if self.action else ""


def xid_error(code: int) -> XidError:
    """Return what the catalogue says of a code."""
    return _CATALOGUE.get(code) or XidError(code, "not in NVIDIA's catalogue", None, "unknown")


_HARDWARE: Mapping[str | None, Mapping[int, str]] = {
    "RESET_GPU": {
        46: "GPU stopped processing",
        62: "internal micro-controller halt",
        64: "memory remapping failure",
        95: "uncontained memory error",
        109: "context switch timeout",
        110: "security fault",
        119: "GSP RPC timeout",
        120: "GSP error",
        136: "link training failed",
        140: "unrecovered ECC error",
        143: "GPU initialization error",
        155: "NVLink: error defined by software",
        156: "resource retirement",
        158: "fatal timeout of the GPU",
    },
    "RESTART_BM": {79: "GPU has fallen off the bus"},
    "WORKFLOW_XID_48": {48: "double bit ECC error"},
    "WORKFLOW_NVLINK_ERR": {74: "NVLink error"},
    "WORKFLOW_NVLINK5_ERR": {
        code: f"NVLink: {unit} error"
        for code, unit in zip(
            range(144, 151), ("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), strict=True
        )
    },
    "CHECK_MECHANICALS": {54: "auxiliary power is not connected"},
    "RESTART_VM": {151: "key rotation error"},
    # The catalogue has no action for these yet.
    None: {
        167: "fatal PCIe timeout",
        168: "reduced memory capacity",
        169: "internal micro-controller halt",
        171: "uncorrectable DRAM error, beside XID 48",
        172: "uncorrectable SRAM error, beside XID 48",
    },
}
_MEMORY: Mapping[str | None, Mapping[int, str]] = {
    "RESTART_APP": {94: "contained memory error"},
    "IGNORE": {
        63: "memory remapping",
        92: "high rate of single-bit ECC errors",
        157: "resource retirement failure",
    },
}
_APPLICATION: Mapping[str | None, Mapping[int, str]] = {
    "RESTART_APP": {
        8: "GPU stopped processing",
        11: "invalid or corrupted push buffer stream",
        13: "graphics engine exception",
        25: "invalid or illegal push buffer stream",
        31: "GPU memory page fault",
        32: "invalid or corrupted push buffer stream",
        60: "video processor exception",
        69: "graphics engine class error",
        80: "corrupted data sent to the GPU",
        86: "OFA exception",
        139: "OFA1 error",
        **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine error"),
        **dict.fromkeys((68, 83, 84, 88, 89, 96, 97, 98), "NVDEC error"),
        **dict.fromkeys((82, *range(99, 106)), "NVJPG error"),
    },
    "IGNORE": {43: "GPU stopped processing", 137: "NVLink privilege error"},
    "WORKFLOW_XID_45": {45: "preemptive cleanup, due to previous errors"},
}
_DRIVER: Mapping[str | None, Mapping[int, str]] = {
    "IGNORE": {
        14: "error injected from user space",
        37: "driver firmware error",
        38: "driver firmware error",
        44: "graphics engine fault during context switch",
        66: "illegal access by driver",
        67: "illegal access by driver",
        93: "InfoROM wear limit",
        106: "SMBPBI test message",
        107: "SMBPBI test message, silent",
        121: "corrected C2C error",
        141: "CUDA fast path error",
        152: "DLA SMMU error",
        153: "DLA timeout",
        160: "channel retirement",
        161: "channel retirement failure",
    },
    "UPDATE_SWFW": {78: "vGPU start error"},
    "CHECK_UVM": {159: "CHI non-data error"},
    "CONTACT_SUPPORT": {142: "NVENC3 error"},
    None: {
        162: "power smoothing reengaged",
        163: "power smoothing disengaged",
        164: "power smoothing: low lifetime",
        165: "power smoothing: lifetime exhausted",
        166: "traffic before the link was encrypted",
        170: "interrupt in confidential computing",
    },
}


_ANOTHER: Mapping[str | None, Mapping[int, str]] = {
    "XID_154": {154: "GPU recovery action changed, because of another XID error"},
}


def _catalogue() -> Iterator[XidError]:
    groups: tuple[tuple[XidMeaning, Mapping[str | None, Mapping[int, str]]], ...] = (
        ("hardware", _HARDWARE),
        ("memory", _MEMORY),
        ("application", _APPLICATION),
        ("driver", _DRIVER),
        ("another", _ANOTHER),
    )
    for meaning, actions in groups:
        for action, codes in actions.items():
            for code, text in codes.items():
                yield XidError(code, text, action, meaning)


_CATALOGUE: Mapping[int, XidError] = {error.code: error for error in _catalogue()}
