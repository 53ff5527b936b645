"""A tiny model whose chat template knows tools, and one that says what it is told to."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_models import make_model_folder, make_tokenizer_files

# ChatML with tools in the system's turn and calls between tags, in words of our own
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\nCall: <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""  # noqa: E501
WIDTH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "width_of",
        "description": "How wide a thing is.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "enum": ["zorb", "blint"]}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    },
}
WEIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weight_of",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"$ref": "#/$defs/thing"}, "grams": {"type": "boolean"}},
            "required": ["thing", "grams"],
            "additionalProperties": False,
            "$defs": {"thing": {"enum": ["zorb", "gnarl"]}},
        },
    },
}
CALL = '<tool_call>\n{"name": "width_of", "arguments": {"thing": "zorb"}}\n</tool_call>'


def make_tool_model_folder(root: Path, context: int = 2048) -> Path:
    """A tiny random llama whose template shows tools; calls have control tokens around them."""
    fast = make_tokenizer_files(root / "llama")
    fast.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    fast.save(str(root / "llama" / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (root / "llama" / "tokenizer_config.json").write_text(json.dumps(config))
    size = fast.get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    return make_model_folder(root, "llama", vocab_size=size, max_position_embeddings=context, **ids)


class TellingDecoder(Decoder):
    """Says `words`, whatever it is asked; then ends. For one answer at a time."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.tokenizer = tokenizer
        self._told: list[int] = []
        self._start: int | None = None  # of the answer: the position of its prompt's last token

    def tell(self, words: str) -> None:
        self._told = [*self.tokenizer.encode(words), min(self.tokenizer.eos_ids)]
        self._start = None

    def hush(self) -> None:
        """Say whatever comes."""
        self._told = []

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        logits = super().forward(batch)
        wanted = [rows.positions[at] for rows in batch for at in rows.wanted]
        if not wanted or not self._told:
            return logits
        if self._start is None:
            self._start = wanted[0]
        for row, position in enumerate(wanted):  # those of a draft too
            at = position - self._start
            if 0 <= at < len(self._told):
                logits[row] = torch.zeros_like(logits[row])
                logits[row, self._told[at]] = 100.0  # also where tokens are drawn
        if wanted[0] - self._start == len(self._told) - 1:
            self._told = []
        return logits
