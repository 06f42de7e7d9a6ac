"""The text of a conversation, by the template in a model's file, in a process of its own.

A template is a program from a file. Jinja's sandbox keeps it from this machine, but not from going on for
ever, nor from taking all memory: the limits of a process do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

#: Seconds of a processor, of a clock where the processor's cannot be limited or the process waits, and bytes.
CPU_SECONDS, SECONDS, MEMORY = 2, 30, 2**29

#: How many characters a template may add to a conversation, each message of which it may repeat once.
MAX_ADDED = 10**6


def render(template: str, messages: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> str:
    """The conversation as far as the model's next turn; `names` are of special tokens.

    Raises
    ------
    ValueError
        If the template does not work, or takes too much.
    """
    given = json.dumps({"template": template, "messages": messages, "names": names})
    try:
        # -P: the modules beside this one have names that others may have.
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=given.encode(), capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {SECONDS} seconds") from None
    if done.returncode < 0 or not done.stdout:
        raise ValueError(f"it takes more than {CPU_SECONDS} s of a processor, or {MEMORY} bytes of memory")
    said: dict[str, str] = json.loads(done.stdout)
    if "error" in said:
        raise ValueError(said["error"])
    return said["text"]


def _main() -> None:
    """The other process: it reads its input as JSON, and writes its result as JSON."""
    _limit_this_process()
    given = json.load(sys.stdin)
    try:
        text = _rendered(**given)
        most = MAX_ADDED + 2 * sum(len(message["content"]) for message in given["messages"])
        said = {"text": text}
        if len(text) > most:
            said = {"error": f"its text has {len(text)} characters, expected {most} at most"}
    except Exception as error:  # of a program in a file, anything
        said = {"error": f"{error!s:.200}" or type(error).__name__}
    json.dump(said, sys.stdout)


def _limit_this_process() -> None:
    try:
        import resource
    except ImportError:  # on Windows, where the clock of the caller is left
        return
    for kind, wanted in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY)):
        allowed = resource.getrlimit(kind)[1]
        if allowed == resource.RLIM_INFINITY or allowed > wanted:
            with suppress(OSError, ValueError):  # a system that cannot limit this
                resource.setrlimit(kind, (wanted, wanted))


def _rendered(template: str, messages: list[dict[str, str]], names: dict[str, str]) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=True, raise_exception=refuse, **names
    )


if __name__ == "__main__":
    _main()
