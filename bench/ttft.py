"""How long until the first token, and where does the time go?

On a CPU with SmolLM2, asked through `Weave` (ttft_cpu.py); on a GPU with random weights of a large
model's shape, over bare PyTorch (ttft_cuda.py).

    python bench/ttft.py --data ../shared/data --out bench/results/ttft-cpu.json
    python bench/ttft.py --device cuda --shape llama-3.1-8b --out bench/results/ttft-cuda.json
"""

import sys


def main() -> None:
    if any("cuda" in word for word in sys.argv[1:]):
        import ttft_cuda

        ttft_cuda.main()
    else:
        import ttft_cpu

        ttft_cpu.main()


if __name__ == "__main__":
    main()
