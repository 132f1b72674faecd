"""Row encoding: how a frame carries rows and updates, exactly or in fewer bits.

    none   the table's own numbers                      exact
    bf16   upper half of float32, to the nearest        |q - x| <= 2^-8 |x|
    fp16   half precision                               |q - x| <= 2^-11 |x|, 6e-5 < |x| < 65504
    int8   q = s round(x / s), s = max|x| / 127         |q - x| <= s / 2, one s per row (sparse) or
                                                        per 1024 elements (dense)

Numbers that are not finite stay so, and are refused where they arrive.
"""

import numpy as np
import torch

from manyhands.kernels import codec_kernels
from manyhands.kernels.compile import compiling
from manyhands.server.protocol.frame import aligned
from manyhands.server.protocol.messages import RowCodec

# Elements of a dense part with one scale. Parts begin at multiples of it, so the values do not
# depend on the number of shards.
BLOCK = 1024

compiled = compiling()


@compiled
def _to_bf16(bits, out):
    for i in range(bits.size):
        x = bits[i]
        # ties to even
        up = np.uint32(x + np.uint32(0x7FFF) + np.uint32((x >> np.uint32(16)) & np.uint32(1)))
        nan = np.uint32(x | np.uint32(0x00400000))  # rounding up must not make it infinite
        out[i] = np.uint16(
            (nan if np.uint32(x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else up)
            >> np.uint32(16)
        )


@compiled
def _from_bf16(halves, out):
    for i in range(halves.size):
        out[i] = np.uint32(halves[i]) << np.uint32(16)


def blocks(count: int, width: int) -> int:
    return -(-count // width)


def nbytes(codec: RowCodec, count: int, itemsize: int, width: int) -> int:
    """Encoded size of `count` numbers, `width` of them with one scale."""
    if codec == "none":
        return count * itemsize
    return 2 * count if codec != "int8" else aligned(4 * blocks(count, width)) + count


def encode(codec: RowCodec, values: np.ndarray, into: np.ndarray, width: int) -> None:
    """`values` in one dimension; `into` bytes, as many as `nbytes` says."""
    if codec == "none":
        np.copyto(into.view(values.dtype), values)
        return
    x = values.astype(np.float32, copy=False)
    if codec == "bf16":
        _to_bf16(x.view(np.uint32), into.view(np.uint16))
    elif codec == "fp16":
        torch.from_numpy(into.view(np.float16)).copy_(torch.from_numpy(x))  # 30 times numpy's cast
    else:
        n = blocks(x.size, width)
        codec_kernels.int8_encode(
            x, into[: 4 * n].view(np.float32), into[aligned(4 * n) :].view(np.int8), width
        )


def decode(codec: RowCodec, raw: np.ndarray, into: np.ndarray, width: int) -> None:
    if codec == "none":
        np.copyto(into, raw.view(into.dtype))
        return
    x = into if into.dtype == np.float32 else np.empty(into.size, np.float32)
    if codec == "bf16":
        _from_bf16(raw.view(np.uint16), x.view(np.uint32))
    elif codec == "fp16":
        torch.from_numpy(x).copy_(torch.from_numpy(raw.view(np.float16)))
    else:
        n = blocks(x.size, width)
        codec_kernels.int8_decode(
            raw[: 4 * n].view(np.float32), raw[aligned(4 * n) :].view(np.int8), x, width
        )
    if x is not into:
        np.copyto(into, x)
