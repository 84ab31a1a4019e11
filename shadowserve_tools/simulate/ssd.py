"""``shadowserve simulate ssd``: up to which hit rate loading hides behind computing, and what it costs.

Tutti's equations 10 and 9, from a review of the paper, whose worked example is wrong (docs/design/simulation.md).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import click

from shadowserve_tools.bench.parts.options import real, whole
from shadowserve_tools.charts import Chart
from shadowserve_tools.report import Output, Report, output_options
from shadowserve_tools.simulate.assumptions import given, last, rows
from shadowserve_tools.simulate.objectcache import LAYERS, TOKEN_LAYER_BYTES

LAYER_PARAMETERS: Final = 218_112_000
"""Of a layer: 4,096 wide, 8 KV heads, 14,336 in its feed-forward network."""
WIDTH: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Inputs of the equations. GB are 10^9 bytes."""

    context_tokens: float = given(131_072, "assumed: the longest of Tutti's figure 9", "of a prompt")
    peak_tflops: float = given(989, "data sheet of the H100, 16 bits, dense", "the GPU's")
    tutti_gb_per_s: float = given(25.9, "Tutti, figure 9", "from SSDs, at 128K tokens")
    gds_gb_per_s: float = given(11.9, "Tutti, figure 9", "the same through GPUDirect Storage, block by block")
    pcie_gb_per_s: float = given(50, "the review's prerequisites", "from host memory")
    gpu_dollars: float = given(5, "equation 9", "an hour of an H100")
    memory_dollars: float = given(0.0088, "equation 9", "an hour of a GB of memory")
    ssd_dollars: float = given(0.000082, "equation 9", "an hour of a GB of SSD")
    memory_gb: float = given(1400, "the review, at equation 9", "memory that is paid for")
    ssd_gb: float = given(14_000, "the review, at equation 9", "SSD that is paid for")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Numbers that follow from :class:`Machine` and from Tutti's crossovers, figure 13."""

    efficiency: float = given(0, "98.3 % at 25.9 GB/s, Tutti", "of the peak that a prefill reaches")
    memory_gb_per_s: float = given(0, "97.9 %, LMCache-DRAM", "from host memory, as LMCache does it, layer by layer")
    file_gb_per_s: float = given(0, "50 %, LMCache-SSD", "from SSDs by files and host memory")


@dataclass(frozen=True)
class System:
    """Source of KV: name of its rate in ``Machine`` or ``Fitted``; memory is paid for, or SSDs."""

    rate: str
    is_memory: bool

    def gb_per_s(self, machine: Machine) -> float:
        return float(getattr(machine if hasattr(machine, self.rate) else FITTED, self.rate))


SYSTEMS: Final = {
    "memory, PCIe": System("pcie_gb_per_s", True),
    "memory, LMCache": System("memory_gb_per_s", True),
    "SSD, Tutti": System("tutti_gb_per_s", False),
    "SSD, GDS": System("gds_gb_per_s", False),
    "SSD, files": System("file_gb_per_s", False),
}
PAPER_CROSSOVERS: Final = {"memory, LMCache": 0.979, "SSD, Tutti": 0.983, "SSD, files": 0.50}


def _operations(machine: Machine, hit_rate: float) -> float:
    """Return the operations of a layer for uncached tokens: its matrices, and attention to all earlier tokens."""
    new = machine.context_tokens * (1 - hit_rate)
    seen = machine.context_tokens - new / 2
    return 2 * new * LAYER_PARAMETERS + 4 * new * seen * WIDTH


def _transfer_s(machine: Machine, hit_rate: float, gb_per_s: float) -> float:
    return machine.context_tokens * hit_rate * TOKEN_LAYER_BYTES / (gb_per_s * 1e9)


def _fit(machine: Machine) -> Fitted:
    """Solve equation 10 at each of the paper's crossovers: for the GPU's speed, and with that for a rate."""
    speed = {
        name: _operations(machine, rate) / _transfer_s(machine, rate, machine.tutti_gb_per_s)
        for name, rate in PAPER_CROSSOVERS.items()
    }
    rates = {name: machine.tutti_gb_per_s * speed["SSD, Tutti"] / its for name, its in speed.items()}
    return Fitted(
        efficiency=speed["SSD, Tutti"] / (machine.peak_tflops * 1e12),
        memory_gb_per_s=rates["memory, LMCache"],
        file_gb_per_s=rates["SSD, files"],
    )


FITTED: Final = _fit(Machine())


def _compute_s(machine: Machine, hit_rate: float) -> float:
    return _operations(machine, hit_rate) / (machine.peak_tflops * 1e12 * FITTED.efficiency)


def crossover(machine: Machine, system: System) -> float:
    """Return the hit rate up to which a layer's transfer takes no longer than its computing: equation 10."""
    rate = system.gb_per_s(machine)
    return last(lambda share: _transfer_s(machine, share, rate) <= _compute_s(machine, share), 1.0)


def _prefill_s(machine: Machine, system: System, hit_rate: float) -> float:
    """Return the time to first token: each layer takes its transfer or its computing, whichever is longer."""
    transfer_s = _transfer_s(machine, hit_rate, system.gb_per_s(machine))
    return LAYERS * max(_compute_s(machine, hit_rate), transfer_s)


def cost(machine: Machine, system: System, hit_rate: float) -> float:
    """Return dollars for a million tokens of prompts, one after the other on one GPU: equation 9."""
    tokens_an_hour = 3600 * machine.context_tokens / _prefill_s(machine, system, hit_rate)
    memory = machine.memory_dollars * machine.memory_gb if system.is_memory else machine.ssd_dollars * machine.ssd_gb
    return (machine.gpu_dollars + memory) / tokens_an_hour * 1e6


@click.command()
@whole("--context-tokens", 131_072, "Tokens of a prompt. The fits hold for the default.", 1024, 10_000_000)
@real("--hit-rate", 0.9375, "Cached share of the prompt, for bubbles and costs.", 0, 1)
@real("--ssd-gb-per-s", 25.9, "Bandwidth of the SSDs; the default is that of Tutti's.", 0.001, 1e6)
@output_options
def ssd(context_tokens: int, hit_rate: float, ssd_gb_per_s: float, output: Output) -> None:
    """Predict up to which hit rate loading a cached prefix is hidden behind computing, and its cost.

    A layer's KV is loaded while the previous layer computes the uncached tokens (Llama 3.1 8B on an H100). Tutti's
    equation 10 gives the crossover, equation 9 the cost. A model, not a measurement: docs/design/simulation.md names
    the fits.

    \b
    The columns:
      crossover  the hit rate above which the GPU waits; paper: Tutti's figure 13
      bubble_ms  waiting time at --hit-rate, all layers together; ttft_ms includes it
      dollars    for a million tokens of prompts at --hit-rate

    \b
    Two SSDs of 7 GB/s:   shadowserve simulate ssd --ssd-gb-per-s 14
    Shorter prompts:      shadowserve simulate ssd --context-tokens 16384
    """
    machine = dataclasses.replace(Machine(), context_tokens=context_tokens, tutti_gb_per_s=ssd_gb_per_s)
    report_of(machine, hit_rate).finish(output)


def assumption_rows(machine: Machine) -> list[dict[str, Any]]:
    """Return the inputs and the fitted numbers."""
    return rows(machine, fitted=False) + rows(FITTED, fitted=True)


def report_of(machine: Machine, hit_rate: float) -> Report:
    """Return a row for each system, and the charts."""
    columns = ["system", "GB_per_s", "crossover", "paper", "ttft_ms", "bubble_ms", "dollars"]
    report = Report("ssd", columns, command="simulate")
    systems: dict[str, dict[str, Any]] = {}
    for name, system in SYSTEMS.items():
        ttft_s = _prefill_s(machine, system, hit_rate)
        bubble_s = ttft_s - LAYERS * _compute_s(machine, hit_rate)
        its = systems[name] = {
            "gb_per_s": system.gb_per_s(machine), "crossover_hit_rate": crossover(machine, system),
            "paper_crossover_hit_rate": PAPER_CROSSOVERS.get(name), "ttft_ms": 1e3 * ttft_s,
            "bubble_ms": 1e3 * bubble_s, "dollars_per_million_tokens": cost(machine, system, hit_rate),
        }  # fmt: skip
        paper = PAPER_CROSSOVERS.get(name)
        report.row(
            system=name, GB_per_s=its["gb_per_s"], crossover=f"{its['crossover_hit_rate']:.3f}",
            paper="" if paper is None else f"{paper:.3f}", ttft_ms=its["ttft_ms"], bubble_ms=its["bubble_ms"],
            dollars=f"{its['dollars_per_million_tokens']:.3f}",
        )  # fmt: skip
    report.more = {"hit_rate": hit_rate, "systems": systems, "assumptions": assumption_rows(machine)}
    rates = [each / 200 for each in range(100, 200)]
    series = {
        name: [(rate, 1e3 * _prefill_s(machine, system, rate)) for rate in rates] for name, system in SYSTEMS.items()
    }
    report.charts = [Chart("Time to first token", x="hit rate", y="ms", series=series, y_log=True)]
    return report
