"""What a device can do at most: dense matmul FLOP/s by CUDA's name of the device and number format. Torch-free.

Figures are those of NVIDIA's data sheets without sparsity (half of what they print for sparse matrices), at boost
clock. A name that is not listed, such as a slice of a GPU (MIG), has no peak: a utilisation that rests on a guess is
worse than none.

To add one: a row under the exact name that `torch.cuda.get_device_name()` gives, with its source.
"""

from dataclasses import dataclass
from enum import Enum


class MatmulFormat(Enum):
    """Number format that matmuls run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float8 = "float8"


@dataclass(kw_only=True, slots=True, frozen=True)
class DevicePeak:
    """Dense peaks of one kind of device, in TFLOP/s."""

    names: tuple[str, ...]
    """As CUDA reports them."""
    float32: float
    """TF32 on tensor cores, whether it is switched on or not: the most that float32 matrices can get."""
    bfloat16: float
    float8: float | None
    """None: the device has none."""
    source: str


DEVICE_PEAKS = (
    DevicePeak(
        names=(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100-PCIE-80GB",
            "NVIDIA A100 80GB PCIe",
        ),
        float32=156.0,
        bfloat16=312.0,
        float8=None,
        source="NVIDIA A100 Tensor Core GPU data sheet",
    ),
    DevicePeak(
        names=("NVIDIA H100 80GB HBM3",),
        float32=494.7,
        bfloat16=989.4,
        float8=1978.9,
        source="NVIDIA H100 Tensor Core GPU Architecture, H100 SXM5",
    ),
    DevicePeak(
        names=("NVIDIA H100 PCIe",),
        float32=378.0,
        bfloat16=756.0,
        float8=1513.0,
        source="NVIDIA H100 Tensor Core GPU Architecture, H100 PCIe",
    ),
    DevicePeak(
        names=("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
        float32=417.5,
        bfloat16=835.5,
        float8=1670.5,
        source="NVIDIA H100 and H200 data sheets, NVL columns",
    ),
    DevicePeak(
        names=("NVIDIA H200",),
        float32=494.5,
        bfloat16=989.5,
        float8=1979.0,
        source="NVIDIA H200 data sheet, SXM column",
    ),
    DevicePeak(
        names=("NVIDIA B200",),
        float32=1125.0,
        bfloat16=2250.0,
        float8=4500.0,
        source="NVIDIA HGX B200 data sheet, an eighth of the board",
    ),
    DevicePeak(
        names=("NVIDIA GB200",),
        float32=1250.0,
        bfloat16=2500.0,
        float8=5000.0,
        source="NVIDIA GB200 NVL72 data sheet, a 72nd of the rack",
    ),
)


def peak_flops(device_name: str | None, number_format: MatmulFormat) -> float | None:
    """Return the peak of one device in FLOP/s; None for one that is not listed (a CPU, say) or lacks the format."""
    for peak in DEVICE_PEAKS:
        if device_name in peak.names:
            tera = {
                MatmulFormat.float32: peak.float32,
                MatmulFormat.bfloat16: peak.bfloat16,
                MatmulFormat.float8: peak.float8,
            }[number_format]
            return None if tera is None else tera * 1e12
    return None
