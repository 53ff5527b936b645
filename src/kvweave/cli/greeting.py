"""What `kvweave serve` says once it is ready: where it is and what to type next."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvweave.app.weave import Weave


def url_of(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):  # noqa: S104 - everywhere, so also here
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greet(weave: "Weave", url: str, *, with_key: bool) -> None:
    """Lines that can be copied and run."""
    from rich.console import Console

    hello = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    key = "YOUR-KEY" if with_key else "none"
    header = " -H 'Authorization: Bearer YOUR-KEY'" if with_key else ""
    console = Console(highlight=False)

    def say(text: str = "", style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"kvweave serves {weave.model_name} at {url}/v1", "bold green")
    say("Ctrl-C stops it. Try it from another terminal:", "dim")
    say()
    say(f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\")
    say(f"    -d '{json.dumps(hello)}'")
    say()
    say("or from Python (pip install openai):", "dim")
    say()
    say("  from openai import OpenAI")
    say(f'  chat = OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions')
    say('  hello = [{"role": "user", "content": "Say hello."}]')
    say(
        f"  print(chat.create(model={weave.model_name!r}, messages=hello, max_tokens=32)"
        ".choices[0].message.content)"
    )
    console.file.flush()
