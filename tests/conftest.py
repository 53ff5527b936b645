"""What every test may rely on: two threads, no network, a cache folder of its own if it asks."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
