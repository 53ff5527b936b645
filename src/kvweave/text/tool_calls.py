"""Tools that a model may call: what a caller offers, and what the model says of it.

The chat template shows the tools, and asks for calls in this form, as Qwen's and many others do:

    <tool_call>
    {"name": "width_of", "arguments": {"thing": "zorb"}}
    </tool_call>

A call that must come (`required`, or one function by name) begins with the opening put into the
model's mouth; what follows is held to a JSON schema of all that may be called.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvweave.errors import RequestError

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FORCED_OPEN = f"{CALL_OPEN}\n"  # what a forced call begins with, in the model's mouth
TOOL_CHOICES = ("auto", "none", "required")
MOST_TOOLS = 128
LONGEST_TOOLS = 256 << 10  # characters of all of them as JSON
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FENCE = re.compile(r"\s*```(?:json)?\s*\n(?P<inside>.*?)\n?\s*```\s*", re.DOTALL)

Message = Mapping[str, Any]  # of a chat, as OpenAI's API has it


class ToolCall(NamedTuple):
    """A call that a model asks for."""

    id: str  # made here: the result of the call is sent back under it
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. Made by `parse`, which checks them."""

    tools: tuple[Mapping[str, Any], ...]
    choice: str = "auto"  # one of TOOL_CHOICES
    named: str | None = None  # the one function that must be called; `choice` is "required"
    parallel: bool = True  # several calls in one answer are welcome

    @classmethod
    def parse(
        cls,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any] | None = None,
        *,
        parallel: bool = True,
    ) -> "ToolUse | None":
        """Parse the tools of a request. None: there is nothing to call. Raises RequestError."""
        made = tuple(_check_tool(tool, place) for place, tool in enumerate(tools))
        names = [tool["function"]["name"] for tool in made]
        if len(made) > MOST_TOOLS:
            raise RequestError(f"there are {len(made)} tools; {MOST_TOOLS} are the most")
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name; give each its own")
        if len(json.dumps(made)) > LONGEST_TOOLS:
            raise RequestError(f"the tools have more than {LONGEST_TOOLS:,} characters as JSON")
        named = _chosen_name(choice)
        if named is None and choice not in (None, *TOOL_CHOICES):
            known = ", ".join(TOOL_CHOICES)
            raise RequestError(f"tool_choice {choice!r} is unknown; known: {known}, or a function")
        if named is not None and named not in names:
            raise RequestError(f"tool_choice names {named!r}, and no tool is called so")
        if choice == "required" and not made:
            raise RequestError("tool_choice 'required' needs tools; send some")
        if not made or choice == "none":
            return None
        must = named is not None or choice == "required"
        return cls(made, "required" if must else "auto", named, parallel)

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        if self.named is not None:
            return frozenset({self.named})
        return frozenset(str(tool["function"]["name"]) for tool in self.tools)

    @property
    def schema(self) -> str:
        """The JSON schema of a call."""
        functions = [tool["function"] for tool in self.tools]
        called = [each for each in functions if each["name"] in self.names]
        parameters = {
            f"tool{i}": _rebase_refs(
                each.get("parameters") or {"type": "object"}, f"#/$defs/tool{i}"
            )
            for i, each in enumerate(called)
        }
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": each["name"]},
                    "arguments": {"$ref": f"#/$defs/tool{i}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, each in enumerate(called)
        ]
        return json.dumps({"$defs": parameters, "anyOf": calls})


class ReadPiece(NamedTuple):
    """What a piece of an answer is."""

    text: str  # words for the user
    calls: tuple[ToolCall, ...] = ()


class CallReader:
    """Finds the calls in an answer that comes in pieces. Belongs to one answer; for one thread.

    Words go out as they come, calls when they are complete. What only looks like a call (no JSON,
    or a function that was not offered) stays words. Small models leave the tags out now and then:
    an answer that is nothing but the JSON of calls, fenced as code or not, is them too.
    """

    def __init__(self, use: ToolUse) -> None:
        self._names = use.names
        self._is_forced = use.is_forced
        self._is_open = False  # a call has begun
        self._held = ""  # text that is not known to be words: of a call, or perhaps its opening
        self._blank = ""  # white space that goes out once words follow it
        self._is_bare = True  # all text so far may be the JSON of a call
        self._num_calls = 0

    def push(self, text: str) -> ReadPiece:
        self._held += text
        if self._is_forced:
            return ReadPiece("")
        self._is_bare = self._is_bare and _may_be_bare(self._held)
        return ReadPiece("") if self._is_bare else self._read()

    def flush(self) -> ReadPiece:
        """What is left at the end."""
        if self._is_forced or self._is_bare:
            fenced = FENCE.fullmatch(self._held)
            calls = self._parse_calls(fenced["inside"] if fenced else self._held)
            if calls:
                return ReadPiece("", calls)
            if self._is_forced:
                return ReadPiece(self._held)  # it was cut
        before = self._read()
        text, self._held = self._held, ""
        after = self._end_call(text, "") if self._is_open else ReadPiece(self._words(text))
        blank = "" if self._num_calls else self._blank
        return ReadPiece(before.text + after.text + blank, before.calls + after.calls)

    def _read(self) -> ReadPiece:
        """What is certain of the held text; the rest stays held."""
        said = ""
        calls: list[ToolCall] = []
        while True:
            mark = CALL_CLOSE if self._is_open else CALL_OPEN
            inside, found, rest = self._held.partition(mark)
            if not found:
                break
            self._held = rest
            if self._is_open:
                read = self._end_call(inside, CALL_CLOSE)
                said, calls = said + read.text, [*calls, *read.calls]
            else:
                said += self._words(inside)
            self._is_open = not self._is_open
        if not self._is_open:
            certain = len(self._held) - _overlap(self._held, CALL_OPEN)
            said += self._words(self._held[:certain])
            self._held = self._held[certain:]
        return ReadPiece(said, tuple(calls))

    def _words(self, text: str) -> str:
        """White space in front of a call is no word, so it waits for one."""
        said = self._blank + text
        kept = said.rstrip()
        self._blank = said[len(kept) :]
        return kept

    def _end_call(self, inside: str, closing: str) -> ReadPiece:
        """Return the call whose end was read, or the words that only look like one."""
        calls = self._parse_calls(inside)
        if not calls:
            return ReadPiece(self._words(f"{CALL_OPEN}{inside}{closing}"))
        self._blank = ""
        return ReadPiece("", calls)

    def _parse_calls(self, text: str) -> tuple[ToolCall, ...]:
        """Parse a text as calls, one JSON object behind the other; none: it is words."""
        calls = [self._call_of(each) for each in _objects(text)]
        made = tuple(call for call in calls if call is not None)
        if len(made) < len(calls):
            return ()
        self._num_calls += len(made)
        return made

    def _call_of(self, said: Any) -> ToolCall | None:
        if not isinstance(said, dict) or said.get("name") not in self._names:
            return None
        arguments = said.get("arguments", {})
        if isinstance(arguments, str):  # some write the object as a text
            arguments = next(iter(_objects(arguments)), None)
        if not isinstance(arguments, dict):
            return None
        words = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", said["name"], words)


def _objects(text: str) -> list[Any]:
    """JSON documents with white space between them; none: the text is something else."""
    found: list[Any] = []
    left = text.strip()
    try:
        while left:
            document, end = json.JSONDecoder().raw_decode(left)
            found.append(document)
            left = left[end:].lstrip()
    except (ValueError, RecursionError):
        return []
    return found


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template wants them: arguments of calls are objects there, and results
    stand in the order of their calls, which is all that some templates tell them apart by. Raises
    RequestError."""
    made: list[dict[str, Any]] = []
    order: list[str] = []  # ids of the calls that are being answered
    results: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            if not made or not (made[-1].get("tool_calls") or results):
                raise RequestError("a 'tool' message answers a call; no message in front has one")
            results.append({**message, "content": str(message.get("content") or "")})
            continue
        made += _in_order(results, order)
        results = []
        calls = [_template_call(call) for call in message.get("tool_calls") or ()]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls:  # who calls need not say anything
            rest = {**rest, "content": rest.get("content") or "", "tool_calls": calls}
        made.append(rest)
        order = [str(call.get("id")) for call in calls]
    return made + _in_order(results, order)


def has_tool_parts(messages: Sequence[Message]) -> bool:
    """Whether a conversation has calls or their results in it."""
    return any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)


def _in_order(results: list[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    places = {name: place for place, name in enumerate(order)}
    last = len(places)
    return sorted(results, key=lambda each: places.get(str(each.get("tool_call_id")), last))


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("a tool call of an earlier message has no function with a name")
    arguments = function.get("arguments") or "{}"
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        shown = str(arguments)[:60]
        raise RequestError(f"arguments of an earlier call are no JSON object: {shown!r}")
    named = {"name": function["name"], "arguments": given}
    return {"id": call.get("id"), "type": "function", "function": named}


def _check_tool(tool: Any, place: int) -> Mapping[str, Any]:
    """Check a tool and return what templates show of it, whatever else the caller sent."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(f"tools[{place}] is no {{'type': 'function', 'function': {{…}}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"tools[{place}] has no name of up to 64 letters, digits, dots, dashes and underscores"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"parameters of the tool {name!r} are no JSON schema")
    shown = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": shown}


def _chosen_name(choice: str | Mapping[str, Any] | None) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError("tool_choice is no {'type': 'function', 'function': {'name': …}}")
    return name


def _rebase_refs(schema: Any, place: str) -> Any:
    """Rewrite a schema that stands at `place` of another: references to its root point there."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase_refs(value, place)
            for key, value in schema.items()
        }
    return [_rebase_refs(each, place) for each in schema] if isinstance(schema, list) else schema


def _may_be_bare(text: str) -> bool:
    """Whether an answer that begins so may be the JSON of a call and nothing else."""
    begun = text.lstrip()
    if begun.startswith("```"):
        body = begun[3:]
        begun = "" if "json".startswith(body) else body.removeprefix("json").lstrip()
    return not begun or begun.startswith("{") or "```".startswith(begun)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


def texts_of_tools(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]
) -> Iterator[str]:
    """What tools and calls add to a prompt, for those who count characters."""
    for tool in tools:
        yield json.dumps(tool, ensure_ascii=False)
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield json.dumps(call, ensure_ascii=False, default=str)
