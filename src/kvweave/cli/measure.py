"""`kvweave measure`: what this machine takes to compute and to load, as plans are priced."""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.knowledge_bases import with_model
from kvweave.cli.options import json_option, model_options, pass_config
from kvweave.config import EffectiveConfig

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.plan.profile import MachineProfile

PREFILLED = (128, 512, 2000, 8000)  # tokens whose prefill is shown
PROMPT = 2000  # tokens of the prompt whose fusion is shown
RATIOS = (0.15, 0.30)


@click.command("measure")
@click.option("--renew", is_flag=True, help="Measure anew, though it was measured before.")
@model_options
@json_option
@pass_config
def command(renew: bool, as_json: bool, effective: EffectiveConfig) -> None:
    """Show what this machine takes with a model; measure it if it never was.

    These are the prices that reuse 'auto' chooses by. Measure while nothing else runs.
    """
    from kvweave.app.auto.machine_profile import find_machine, new_machine, profile_path, save
    from kvweave.app.library.library_kv import CODEC
    from kvweave.app.library.runtime import ModelRuntime

    runtime = ModelRuntime.open(with_model(effective.config).model)
    codec = effective.config.store.codec or CODEC
    try:
        decoder = runtime.decoder
        machine = find_machine(decoder, codec)
        if machine is None:
            machine = new_machine(decoder, codec)
        elif renew:
            machine.renew(new_machine(decoder, codec))
            save(machine, profile_path(decoder, codec))  # with the tiers that were known
        path = profile_path(decoder, codec)
    finally:
        runtime.close()
    if as_json:
        told = {"model": runtime.name, "weights": decoder.weights_detail, "file": str(path)}
        click.echo(json.dumps({**told, **document(machine)}))
        return
    from kvweave.cli.tables import table_console

    console = table_console()
    console.print(f"{runtime.name} on {machine.device}", style="bold")
    console.print(decoder.weights_detail, soft_wrap=True)
    console.print(_table(machine))
    console.print(words(machine), soft_wrap=True)
    console.print(str(path), style="dim", soft_wrap=True)


def document(machine: "MachineProfile") -> dict[str, Any]:
    """What a profile says, as JSON."""
    full_s = machine.prefill.at(0, PROMPT)
    return {
        "device": machine.device,
        "measured": _date(machine.measured_s),
        "prefill": [
            {"tokens": n, "seconds": _round_digits(s), "tokens_per_s": _round_digits(n / s)}
            for n, s in _prefill(machine)
        ],
        "fused": [
            {
                "tokens": PROMPT,
                "ratio": ratio,
                "recompute_s": _round_digits(recompute_s),
                "lay_s": _round_digits(lay_s),
                "speed_up": _round_digits(full_s / (recompute_s + lay_s)),
            }
            for ratio, recompute_s, lay_s in _fuse_times(machine)
        ],
        "relation": _round_digits(machine.relation),
        "tiers": {
            name: {
                "bytes_per_s": round(link.bytes_per_s),
                "latency_s": _round_digits(link.latency_s),
                "paid_shares": [_round_digits(share) for share in link.paid.shares],
            }
            for name, link in sorted(machine.links.items())
        },
        "answers": {"exact": machine.heard.exact, "fused": machine.heard.fused},
    }


def words(machine: "MachineProfile") -> str:
    """What the table does not say, in a line."""
    heard, when = machine.heard, _date(machine.measured_s) or "at a time that was not kept"
    told = f"{heard.exact:,} exact and {heard.fused:,} fused answers moved it since"
    return f"measured {when}; {told}"


def _table(machine: "MachineProfile") -> "Table":
    from kvweave.cli.tables import make_table

    rows = [
        (f"prefill of {tokens:,} tokens", _time(seconds), f"{tokens / seconds:,.0f}/s")
        for tokens, seconds in _prefill(machine)
    ]
    full_s = machine.prefill.at(0, PROMPT)
    for ratio, recompute_s, lay_s in _fuse_times(machine):
        what = f"recomputing {ratio:.0%} of {PROMPT:,} tokens"
        speed_up = f"{full_s / (recompute_s + lay_s):.1f}× as fast as prefill"
        rows.append((what, f"{_time(recompute_s)} + {_time(lay_s)}", speed_up))
    for name, link in sorted(machine.links.items()):
        shares = f", paid {link.paid.shares[-1]:.2f} of it" if link.paid.shares else ""
        rows.append((f"loading from {name}", "", f"{_speed_text(link.bytes_per_s)}{shares}"))
    return make_table(("what", "takes", "which is"), rows, right=("takes", "which is"))


def _prefill(machine: "MachineProfile") -> list[tuple[int, float]]:
    return [(n, max(1e-9, machine.prefill.at(0, n))) for n in PREFILLED]


def _fuse_times(machine: "MachineProfile") -> list[tuple[float, float, float]]:
    """By ratio: seconds of recomputing that share of a prompt, and of laying stored tokens."""
    return [
        (
            ratio,
            max(1e-9, machine.recompute.at(PROMPT, int(ratio * PROMPT))),
            PROMPT * machine.stitch_s,
        )
        for ratio in RATIOS
    ]


def _date(at_s: float) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s)) if at_s else None


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _speed_text(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )


def _round_digits(number: float) -> float:
    return float(f"{number:.4g}")
