"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

CONNECTOR = "KvweaveConnector"
MODELS = {
    "LlamaForCausalLM": "FusedLlama",
    "MistralForCausalLM": "FusedMistral",
    "Qwen2ForCausalLM": "FusedQwen2",
    "Qwen3ForCausalLM": "FusedQwen3",
}


def register() -> None:
    """Make the connector known by name, and models that it can find. Imports neither. Twice is
    harmless."""
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, "kvweave.hosts.vllm.connector", CONNECTOR)
    except ValueError:
        return  # it is known already
    for architecture, name in MODELS.items():
        ModelRegistry.register_model(architecture, f"kvweave.hosts.vllm.models:{name}")
