"""The picture of bench/bandwidth/run.py: TTFT over link speed, the selection part marked."""

import math
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 720, 420, 70, 40
COLOURS = {"qcfuse": "#1f6f8b", "prophetkv": "#c05621"}


def plot(result: dict[str, Any], out: Path) -> None:
    """Lines: TTFT. Dashes: until the rows were known."""
    cells = result["cells"]
    speeds = sorted({c["gb_s"] for c in cells})
    top = 10 ** math.ceil(math.log10(max(c["ttft_ms"] for c in cells)))
    bottom = 10 ** math.floor(math.log10(min(c["selected_ms"] for c in cells)))

    def x(speed: float) -> float:
        span = math.log(speeds[-1] / speeds[0])
        return LEFT + (WIDTH - LEFT - 20) * math.log(speed / speeds[0]) / span

    def y(ms: float) -> float:
        return TOP + (HEIGHT - TOP - 50) * math.log(top / ms) / math.log(top / bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20">Time to first token over link speed, '
        f"{result['prompt_tokens']:,} tokens, {result['config']['shape']}, "
        f"{result['device']}</text>",
    ]
    tick = bottom
    while tick <= top:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(tick):.0f}" y2="{y(tick):.0f}" '
            f'stroke="#ddd"/><text x="{LEFT - 8}" y="{y(tick) + 4:.0f}" text-anchor="end">'
            f"{tick:g} ms</text>"
        )
        tick *= 10
    parts += [
        f'<text x="{x(speed):.0f}" y="{HEIGHT - 30}" text-anchor="middle">{speed}</text>'
        for speed in speeds
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">GB/s</text>')
    for i, (mode, colour) in enumerate(COLOURS.items()):
        own = sorted((c for c in cells if c["way"] == mode), key=lambda c: c["gb_s"])
        for field, dash in (("ttft_ms", ""), ("selected_ms", ' stroke-dasharray="5 4"')):
            points = " ".join(f"{x(c['gb_s']):.1f},{y(c[field]):.1f}" for c in own)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="2"{dash}/>'
            )
        label = f"{mode} (dashed: until its rows are known)"
        parts.append(
            f'<text x="{WIDTH - 30}" y="{TOP + 18 + 18 * i}" text-anchor="end" '
            f'fill="{colour}">{label}</text>'
        )
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")
