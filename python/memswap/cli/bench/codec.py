"""``python -m memswap bench codec``: ratio and rate of the codec on real activations."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

import memswap
from memswap._native import native
from memswap.cli.arguments import file, sizes, whole, write
from memswap.cli.bench.environment import describe_environment
from memswap.cli.bench.kinds import capture
from memswap.cli.bench.peers import Peer, find_peers
from memswap.cli.bench.picture import draw
from memswap.cli.bench.timing import median_rates, median_ratio, times_s
from memswap.cli.model_options import check_device
from memswap.cli.table import render_table
from memswap.codec import Layout, LayoutName, dtype_code

MIB = 1 << 20
UNIT_NBYTES = 8  # docs/format.md section 1


@dataclass(frozen=True)
class Measurement:
    """One codec on one tensor. Rates are bytes of uncompressed input per second."""

    codec: str
    tensor: str
    nbytes: int
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    copy_bytes_per_s: float
    """What a plain copy of the same tensor reached in the same run."""
    temporary_nbytes: int | None = None
    """What an encode takes for a while, beside the tensor and what it returns; None: unknown."""
    threads: int = 1
    """That encoded and decoded."""
    memswap_encode_times: float | None = None
    """Of another codec: how many times as fast memswap was, as the median of rounds in which both
    had their turn. None: this is memswap."""
    memswap_decode_times: float | None = None


@dataclass
class Result:
    """Everything one run of the benchmark found."""

    kinds: list[Measurement] = field(default_factory=list)
    sizes: list[Measurement] = field(default_factory=list)
    peers: list[Measurement] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    """Best ratio that any code of single exponents could reach, by tensor (see `entropy_bound`)."""
    missing: list[str] = field(default_factory=list)
    threads: int = 1
    """Of torch and of the codec, in whatever was measured."""


def entropy_bound(tensor: torch.Tensor) -> float | None:
    """The ratio of a perfect order-0 code of the exponents, everything else stored as it is.

    Elements that are +-0 are coded apart, by one perfect bit each and their sign; a frame, which
    sees that zeros come in runs, can be beyond it. None for what is no bfloat16 tensor.
    """
    if tensor.dtype != torch.bfloat16 or tensor.numel() == 0:
        return None
    words = tensor.contiguous().view(torch.int16).flatten().to(torch.int32)
    magnitudes = words & 0x7FFF
    survivors = magnitudes[magnitudes != 0] >> 7

    def entropy(counts: torch.Tensor) -> float:
        shares = counts[counts > 0].double() / counts.sum()
        return float(-(shares * shares.log2()).sum())

    zeros = magnitudes.numel() - survivors.numel()
    bits = entropy(torch.tensor([zeros, survivors.numel()])) * magnitudes.numel()
    if zeros:
        negative = int((words[magnitudes == 0] < 0).sum())
        bits += entropy(torch.tensor([negative, zeros - negative])) * zeros
    if survivors.numel():
        bits += (8 + entropy(torch.bincount(survivors))) * survivors.numel()
    return 16 * magnitudes.numel() / bits if bits else None


def repeated(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A flat tensor of about ``nbytes`` bytes that repeats ``tensor``; fit for codecs without a
    memory beyond a block, as ours is.
    """
    elements = max(1, nbytes // tensor.element_size())
    flat = tensor.flatten()
    return flat.repeat(-(-elements // flat.numel()))[:elements].clone()


def temporary_nbytes(tensor: torch.Tensor, layout: LayoutName | None) -> int:
    """What ``memswap.encode`` takes for a while, beside the tensor and the frame that it returns.

    On a CPU that is what a frame of the worst case has more than the one that it is cut to; the
    codec's staging of 100 KiB a thread comes on top of it. Elsewhere it is what torch's allocator
    saw.
    """
    if tensor.device.type == "cpu":
        # The worst case of every layout is the same (docs/format.md section 3).
        sizes = native.frame_sizes(dtype_code(tensor.dtype), Layout.RAW, tensor.numel())
        worst = sizes.fixed_nbytes + sizes.max_var_units * UNIT_NBYTES
        return int(worst - memswap.encode(tensor, layout=layout).nbytes)
    module = torch.get_device_module(tensor.device)
    before = module.memory_allocated(tensor.device)
    module.reset_peak_memory_stats(tensor.device)
    frame = memswap.encode(tensor, layout=layout)
    module.synchronize(tensor.device)
    return int(module.max_memory_allocated(tensor.device) - before - frame.nbytes)


class Bench:
    """Measures memswap and its peers on one device; a copy is measured beside each.

    Args:
        device: of the tensors.
        rounds: that each measurement takes.
        show: is called with each line as it comes.
    """

    def __init__(self, device: torch.device, rounds: int, show: Callable[[str], object]) -> None:
        self.device = device
        self.rounds = rounds
        self.show = show
        self.threads = torch.get_num_threads()
        self.peers, self.missing = find_peers(device, self.threads)

    def memswap(
        self, name: str, tensor: torch.Tensor, layout: LayoutName | None = None
    ) -> Measurement:
        """``memswap.encode`` and ``decode``, end to end: allocation and Python included.

        Args:
            name: of the tensor, in tables.
            tensor: that is encoded.
            layout: of its frame; None: `encode` chooses.
        """
        frame = memswap.encode(tensor, layout=layout)
        back = memswap.decode(frame)
        if not torch.equal(back.view(torch.uint8), tensor.view(torch.uint8)):
            raise SystemExit(f"{name}: decode gave other bytes than were encoded; this is a bug")
        del back
        target = torch.empty_like(tensor)
        rates = median_rates(
            {
                "encode": lambda: memswap.encode(tensor, layout=layout),
                "decode": lambda: memswap.decode(frame),
                "copy": lambda: target.copy_(tensor),
            },
            tensor.nbytes,
            self.device,
            self.rounds,
        )
        return Measurement(
            "memswap",
            name,
            tensor.nbytes,
            tensor.nbytes / frame.nbytes,
            rates["encode"],
            rates["decode"],
            rates["copy"],
            temporary_nbytes(tensor, layout),
            self.threads,
        )

    def peer(
        self, peer: Peer, name: str, tensor: torch.Tensor, layout: LayoutName | None = None
    ) -> Measurement:
        """One peer on the same bytes, and memswap between its rounds.

        Args:
            peer: another codec.
            name: of the tensor, in tables.
            tensor: that is encoded.
            layout: of memswap's frame; None: `encode` chooses.
        """
        source = peer.prepare(tensor)
        coded = peer.encode(source)
        if peer.raw(peer.decode(coded)) != peer.raw(source):
            raise ValueError("decoding gave other bytes than were encoded")
        frame = memswap.encode(tensor, layout=layout)
        target = torch.empty_like(tensor)
        work: dict[str, Callable[[], object]] = {
            "encode": lambda: peer.encode(source),
            "our encode": lambda: memswap.encode(tensor, layout=layout),
            "decode": lambda: peer.decode(coded),
            "our decode": lambda: memswap.decode(frame),
            "copy": lambda: target.copy_(tensor),
        }
        took = times_s(work, self.device, max(5, self.rounds // 2))
        rates = {what: tensor.nbytes / statistics.median(times) for what, times in took.items()}
        return Measurement(
            peer.name,
            name,
            tensor.nbytes,
            tensor.nbytes / peer.size(coded),
            rates["encode"],
            rates["decode"],
            rates["copy"],
            threads=peer.threads,
            memswap_encode_times=median_ratio(took["encode"], took["our encode"]),
            memswap_decode_times=median_ratio(took["decode"], took["our decode"]),
        )

    def run(self, kinds: dict[str, torch.Tensor], sizes_mib: list[int]) -> Result:
        """Every kind, every size of three kinds, every peer on five kinds."""
        result = Result(missing=self.missing, threads=self.threads)
        for name, tensor in kinds.items():
            self.show(f"memswap on {name}")
            bound = entropy_bound(tensor)
            if bound is not None:
                result.bounds[name] = bound
            layout = layout_of(name, tensor)
            result.kinds.append(self.memswap(name, tensor, layout))
        largest = max(sizes_mib) * MIB // 2
        normal = torch.randn(largest, device=self.device, dtype=torch.float32).to(torch.bfloat16)
        bits = torch.randint(-(2**15), 2**15, (largest,), device=self.device, dtype=torch.int16)
        sources = {
            "N(0,1)": normal,
            "residual": repeated(kinds["residual"], largest * 2),
            "random bits": bits.view(torch.bfloat16),
        }
        for name, tensor in sources.items():
            bound = entropy_bound(tensor[: 8 * MIB])
            if bound is not None:
                result.bounds.setdefault(name, bound)
            for mib in sizes_mib:
                self.show(f"memswap on {name}, {mib} MiB")
                result.sizes.append(self.memswap(name, tensor[: mib * MIB // 2].clone()))
        for name in ("residual", "softmax", "SwiGLU", "ReLU^2", "weight"):
            if name not in kinds:
                continue
            tensor = kinds[name]
            layout = layout_of(name, tensor)
            result.peers.append(self.memswap(name, tensor, layout))
            for peer in self.peers:
                self.show(f"{peer.name} on {name}")
                try:
                    result.peers.append(self.peer(peer, name, tensor, layout))
                except Exception as error:  # somebody else's code: whatever it raises is a reason
                    reason = f"{peer.name} on {name}: {type(error).__name__}: {error}"
                    result.missing.append(reason)
        return result


def layout_of(name: str, tensor: torch.Tensor) -> LayoutName | None:
    """The layout that the engine would come to, from what it had learnt of this tensor before."""
    if "upcast" in name:
        return "upcast"
    zeros = float((tensor == 0).double().mean()) if tensor.is_floating_point() else 0.0
    return "sparse" if zeros > 0.2 else None


def render(result: Result) -> str:
    """The result as tables of text."""

    def row(found: Measurement) -> list[str]:
        bound = result.bounds.get(found.tensor)
        return [
            found.tensor,
            f"{found.nbytes / MIB:.0f}",
            f"{found.ratio:.3f}",
            "-" if bound is None else f"{bound:.3f}",
            *(f"{rate / 1e9:.2f}" for rate in (found.encode_bytes_per_s, found.decode_bytes_per_s)),
            f"{found.encode_bytes_per_s / found.copy_bytes_per_s:.2f}x",
            f"{found.decode_bytes_per_s / found.copy_bytes_per_s:.2f}x",
            "-" if found.temporary_nbytes is None else f"{found.temporary_nbytes / MIB:.2f}",
        ]

    def times(found: float | None) -> str:
        return "-" if found is None else f"{found:.1f}x"

    numbers = [
        "MiB",
        "ratio",
        "bound",
        "encode GB/s",
        "decode GB/s",
        "/ copy",
        "/ copy",
        "temporary MiB",
    ]
    tables = [
        render_table(["kind", *numbers], [row(found) for found in result.kinds]),
        render_table(["size", *numbers], [row(found) for found in result.sizes]),
        render_table(
            ["codec", "tensor", *numbers, "threads", "memswap encodes", "and decodes"],
            [
                [
                    found.codec,
                    *row(found),
                    str(found.threads),
                    times(found.memswap_encode_times),
                    times(found.memswap_decode_times),
                ]
                for found in result.peers
            ],
        ),
    ]
    return "\n\n".join([*tables, *(f"not measured: {reason}" for reason in result.missing)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench codec``."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    parser.add_argument(
        "--steps", type=whole(1), default=60, help="training steps before the capture"
    )
    parser.add_argument("--sizes", type=sizes, default="1,4,16,64,256", help="tensor sizes, MiB")
    parser.add_argument("--kind-size", type=whole(1), default=16, help="tensor of each kind, MiB")
    parser.add_argument("--rounds", type=whole(1), default=9, help="measured; medians are shown")
    parser.add_argument("--threads", type=whole(1), default=1, help="of torch and of the codec")
    parser.add_argument("--json", type=file, help="write the result to this file as well")
    parser.add_argument("--picture", type=file, help="draw throughput against ratio (PNG)")


def measure(arguments: argparse.Namespace) -> Result:
    """Train, capture, measure and show; the options are those of ``add_arguments``."""
    check_device(arguments.device)
    device = torch.device(arguments.device)
    kinds = capture(arguments.steps, arguments.kind_size * MIB, device)
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        bench = Bench(device, arguments.rounds, lambda text: print(f"  {text}", flush=True))
        result = bench.run(kinds, arguments.sizes)
    finally:
        torch.set_num_threads(before)
    print("\n" + render(result))
    if arguments.picture is not None:
        draw([*result.peers], arguments.picture)
        print(f"drawn: {arguments.picture}")
    return result


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return the exit status."""
    result = measure(arguments)
    if arguments.json is not None:
        environment = describe_environment(torch.device(arguments.device))
        content = {"environment": environment, **asdict(result)}
        write(arguments.json, json.dumps(content, indent=1))
        print(f"written: {arguments.json}")
    return 0
