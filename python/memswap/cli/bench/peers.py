"""Other lossless codecs, measured in the same run where they can be imported.

None is a dependency of memswap: ``pip install memswap[bench]`` brings those for a CPU. Each is
given the tensor's bytes and as many threads as memswap; those that know of one alone say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Peer:
    """A codec: ``encode`` of prepared input gives what ``decode`` takes and ``size`` measures."""

    name: str
    prepare: Callable[[torch.Tensor], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    size: Callable[[Any], int]
    raw: Callable[[Any], bytes]
    threads: int
    """How many it works with; of one on a device, whatever the device has."""


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().numpy())


def _zipnn(threads: int) -> Iterator[Peer]:
    zipnn = importlib.import_module("zipnn")
    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=threads)
    # It splits its input in place, so every call gets bytes of its own.
    yield Peer(
        f"zipnn {_version('zipnn')}",
        _bytes,
        lambda raw: codec.compress(bytearray(raw)),
        codec.decompress,
        len,
        bytes,
        threads,
    )


def _zstd(_threads: int) -> Iterator[Peer]:
    zstandard = importlib.import_module("zstandard")
    decoder = zstandard.ZstdDecompressor()
    for level in (1, 3):
        encoder = zstandard.ZstdCompressor(level=level)
        name = f"zstd -{level} ({zstandard.__version__})"
        yield Peer(name, _bytes, encoder.compress, decoder.decompress, len, bytes, 1)


def _lz4(_threads: int) -> Iterator[Peer]:
    block = importlib.import_module("lz4.block")
    yield Peer(f"lz4 {_version('lz4')}", _bytes, block.compress, block.decompress, len, bytes, 1)


def _blosc2(threads: int) -> Iterator[Peer]:
    blosc2 = importlib.import_module("blosc2")
    blosc2.set_nthreads(threads)

    def encode(raw: bytes) -> Any:
        return blosc2.compress2(
            raw,
            typesize=2,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.SHUFFLE],
        )

    name = f"blosc2 shuffle+zstd -1 ({blosc2.__version__})"
    yield Peer(name, _bytes, encode, blosc2.decompress2, len, bytes, threads)


def _nvcomp(threads: int) -> Iterator[Peer]:
    nvcomp = importlib.import_module("nvidia.nvcomp")

    def prepare(tensor: torch.Tensor) -> Any:
        return nvcomp.as_array(tensor.contiguous().view(torch.uint8).flatten())

    def raw(array: Any) -> bytes:
        return bytes(torch.as_tensor(array, device="cuda").view(torch.uint8).cpu().numpy())

    for algorithm, data_type in (
        ("ANS", "<f2"),  # its name for every 16-bit float
        ("Bitcomp", "<u2"),
        ("GDeflate", "|u1"),
        ("LZ4", "|u1"),
    ):
        stream = torch.cuda.current_stream().cuda_stream
        codec = nvcomp.Codec(algorithm=algorithm, data_type=data_type, cuda_stream=stream)
        yield Peer(
            f"nvCOMP {algorithm} ({nvcomp.__version__})",
            prepare,
            codec.encode,
            codec.decode,
            lambda array: int(array.buffer_size),
            raw,
            threads,
        )


def _version(distribution: str) -> str:
    metadata = importlib.import_module("importlib.metadata")
    return str(metadata.version(distribution))


def find_peers(device: torch.device, threads: int) -> tuple[list[Peer], list[str]]:
    """The peers that work on ``device``, and a line for each that could not be had."""
    makers = [_nvcomp] if device.type == "cuda" else [_zipnn, _zstd, _lz4, _blosc2]
    found: list[Peer] = []
    missing: list[str] = []
    for maker in makers:
        try:
            found.extend(maker(threads))
        except Exception as error:  # somebody else's code: whatever it raises is a reason
            missing.append(f"{maker.__name__.lstrip('_')}: {type(error).__name__}: {error}")
    return found, missing
