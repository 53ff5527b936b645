"""How long until the first token, and where does the time go?

On a CPU with SmolLM2, asked through `Weave` (cpu.py); on a GPU with random weights of a large
model's shape, over bare PyTorch (cuda.py).

    python bench/ttft/run.py --data ../shared/data --out bench/results/ttft-cpu.json
    python bench/ttft/run.py --device cuda --shape llama-3.1-8b --out bench/results/ttft-h200.json
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder


def main() -> None:
    if any("cuda" in word for word in sys.argv[1:]):
        from ttft.cuda import main as measure
    else:
        from ttft.cpu import main as measure
    measure()


if __name__ == "__main__":
    main()
