"""Parts of `bench/vllm_gpu.py`: an engine in this process's hands, its drawn model, prompts."""
