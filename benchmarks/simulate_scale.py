"""Simulation of 8 and 64 GPUs from step times that were measured on one H200 and public link bandwidths.

No machine with several GPUs was at hand: these are estimates. Assumed, besides the figures below:

* a rank's share of a step takes its share of the measured time (weights are read at the bandwidth of one GPU);
* collectives run at the bandwidth of the slowest link, plus a fixed latency, and do not overlap with kernels;
* routing is uniform: every engine gets as many tokens for its experts;
* hosts plan in times that are distributed exponentially; the exchange between hosts takes 50 us, an all-reduce 100 us.

    python benchmarks/simulate_scale.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NODE = 8  # GPUs with NVLink between them
NVLINK = 450e9  # bytes/s in each direction: NVLink 4, 900 GB/s in both
NETWORK = 50e9  # bytes/s per GPU: InfiniBand NDR, 400 Gbit/s
NVLINK_LATENCY, NETWORK_LATENCY = 12e-6, 30e-6  # seconds per collective
READ, FLOPS = 4.2e12, 700e12  # measured: bytes/s of a copy kernel, FLOP/s of GEMMs
ROWS = 256


@dataclass(frozen=True)
class Model:
    name: str
    step: float  # measured seconds of a decode step of 256 rows
    layers: int
    hidden: int
    expert_bytes: float = 0.0  # of all experts
    expert_flops: float = 0.0  # of one step's tokens


DENSE = Model("Qwen3-8B", ROWS / 21032, 36, 4096)
_EXPERT = 3 * 2048 * 768  # weights of one expert
MOE = Model("Qwen3-30B-A3B", ROWS / 12746, 48, 2048, 48 * 128 * _EXPERT * 2, 48 * ROWS * 8 * 2 * _EXPERT)


def link(size: int) -> tuple[float, float]:
    return (NVLINK, NVLINK_LATENCY) if size <= NODE else (NETWORK, NETWORK_LATENCY)


def all_reduce(size: int, num_bytes: float) -> float:
    bandwidth, latency = link(size)
    return 0.0 if size == 1 else latency + 2 * (size - 1) / size * num_bytes / bandwidth


def tensor_parallel(model: Model, size: int) -> float:
    """Seconds of a step: the measured time divided, and two all-reduces in each layer."""
    return model.step / size + 2 * model.layers * all_reduce(size, ROWS * model.hidden * 2)


def exchange_bytes(model: Model, size: int, way: str) -> float:
    """Bytes that an engine receives over the slowest link, to gather the tokens of a layer."""
    per_token = model.hidden * 2 + 8 * 8  # 8 experts and weights
    far = size - (1 if size <= NODE else NODE)  # engines behind the slowest link
    tokens = ROWS * far if way == "all-gather" else ROWS * 8 * far / size
    return tokens * per_token


def expert_parallel(model: Model, size: int, way: str) -> float:
    """Seconds of a step of engines of 256 rows each that share experts."""
    experts = max(model.expert_bytes / READ, model.expert_flops / FLOPS)
    own = max(model.expert_bytes / size / READ, model.expert_flops / FLOPS)
    bandwidth, latency = link(size)
    moved = 2 * model.layers * (latency + exchange_bytes(model, size, way) / bandwidth)
    return model.step - experts + own + (moved if size > 1 else 0.0)


def coordinated(step: float, size: int, host: float, way: str, steps: int = 4000) -> tuple[float, float]:
    """Mean seconds of a joint step, and those that a host waits for others in it, with one step queued ahead and
    planning times of mean `host`."""
    draw = np.random.default_rng(0)
    free = np.zeros(size)  # when each host can plan
    ended = [0.0, 0.0]  # the last two steps on the device
    posted_by_all = waited = 0.0
    for _ in range(steps):
        posted = np.maximum(free, ended[0]) + draw.exponential(host, size)
        if way == "exchange":
            waited += float(np.maximum(posted_by_all - posted, 0).mean())
            posted = np.maximum(posted, posted_by_all)  # the step before is launched first
            posted_by_all = float(posted.max()) + 50e-6
            free = posted
        else:
            posted_by_all = float(posted.max()) + 100e-6
            waited += float((posted_by_all - posted).mean())
            free = np.full(size, posted_by_all)
        ended = [ended[1], max(ended[1], posted_by_all) + step]
    return ended[1] / steps, waited / steps


def main() -> None:
    print(f"{DENSE.name}, decode of {ROWS} rows per replica or group of ranks; tokens/s of all GPUs, ms a step")
    for gpus in (8, 64):
        print(f"  {gpus:2} GPUs, replicas: {gpus * ROWS / DENSE.step:10,.0f}  {DENSE.step * 1e3:6.2f}")
        for size in (2, 4, 8):
            step = tensor_parallel(DENSE, size)
            print(f"  {gpus:2} GPUs, tensor parallel {size}: {gpus / size * ROWS / step:10,.0f}  {step * 1e3:6.2f}")
    print(f"{MOE.name}, engines of {ROWS} rows; tokens/s of all GPUs, ms a step")
    for gpus in (8, 64):
        print(f"  {gpus:2} GPUs, replicas: {gpus * ROWS / MOE.step:10,.0f}  {MOE.step * 1e3:6.2f}")
        for size in (8, 64):
            for way in ("all-gather", "all-to-all") if size <= gpus else ():
                step = expert_parallel(MOE, size, way)
                total = gpus * ROWS / step
                print(f"  {gpus:2} GPUs, experts over {size}, {way}: {total:10,.0f}  {step * 1e3:6.2f}")
    print("joint steps of 10 ms: ms a step, and of these a host waits for other hosts")
    for host in (1e-3, 2e-3, 5e-3):
        for size in (2, 8, 64):
            for way in ("exchange", "all-reduce"):
                seconds, waited = coordinated(10e-3, size, host, way)
                print(
                    f"  {size:2} engines, planning {host * 1e3:g}, {way:>10}: {seconds * 1e3:6.2f} {waited * 1e3:6.2f}"
                )


if __name__ == "__main__":
    main()
