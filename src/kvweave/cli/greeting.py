"""What a server says once it is ready: where it is, and lines that can be copied and run."""

import json
from pathlib import Path

EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - addresses that take requests from anywhere


def url_of(host: str, port: int) -> str:
    if host in EVERYWHERE:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greet(model: str, words: str, url: str, root: Path | None, *, with_key: bool) -> None:
    """Lines that can be copied and run."""
    from rich.console import Console

    hello = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    key = "YOUR-KEY" if with_key else "none"
    header = " -H 'Authorization: Bearer YOUR-KEY'" if with_key else ""
    console = Console(highlight=False)

    def say(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"kvweave serves {model} at {url}/v1", "bold green")
    if root is None:
        say("knowledge bases: those of --kb; --kb-root DIR lets uploads make others", "dim")
    else:
        say(f"knowledge bases: {root} (an upload makes one)", "dim")
    say(f"web page: {url}/", "dim")
    say(words, "dim")
    say("Ctrl-C stops it. Try it from another terminal:", "dim")
    say()
    if root is not None:
        say(f"  curl {url}/v1/kb/notes/documents{header} -F file=@README.md")
    say(f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\")
    say(f"    -d '{json.dumps(hello)}'")
    say()
    say("or from Python (pip install openai):", "dim")
    say()
    say("  from openai import OpenAI")
    say(f'  chat = OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions')
    say('  hello = [{"role": "user", "content": "Say hello."}]')
    say(
        f"  print(chat.create(model={model!r}, messages=hello, max_tokens=32)"
        ".choices[0].message.content)"
    )
    console.file.flush()
