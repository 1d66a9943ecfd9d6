"""The Dockerfile: the rules of hadolint that matter here, since it can't be built in a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cluster.checks.outcome import REPOSITORY, Outcome, documents, outcome

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY", re.I)


def checks(folder: Path) -> list[Outcome]:
    """Pinned, small, not root, without secrets; and the tag that all files name."""
    lines = instructions((folder / "Dockerfile").read_text())
    return [
        outcome("Dockerfile", "rules", _rules(lines)),
        outcome("Dockerfile", "copies", _copies(lines)),
        outcome("Dockerfile", "tag", _tags(folder, lines)),
    ]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each, continuation lines joined, comments dropped."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", kept)
    return [
        (words[0].upper(), words[1])
        for line in joined.splitlines()
        if len(words := line.split(maxsplit=1)) == 2
    ]


def _rules(lines: list[tuple[str, str]]) -> Iterator[str]:
    for word, rest in lines:
        if word == "FROM" and not re.search(
            r"(:[^:/\s]*\d[^:/\s]*|@sha256:[0-9a-f]{64})(\s|$)", rest
        ):
            yield f"FROM {rest}: not pinned"
        if word == "ADD":
            yield f"ADD {rest}: COPY does less"
        if word in ("ENV", "ARG") and SECRET.search(rest):
            yield f"{word} {rest}: a secret stays in the image"
        if word == "RUN":
            yield from _run(rest)
        if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            yield f"{word} {rest}: a shell would swallow signals"
    users = [rest for word, rest in lines if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:\d+)?", users[-1]):
        yield "USER: the last one is not a number above 0 (runAsNonRoot needs a number)"
    if not any(word == "SHELL" and "pipefail" in rest for word, rest in lines):
        yield "SHELL without pipefail: a failing part of a pipe goes unseen"


def _run(command: str) -> Iterator[str]:
    if "apt-get install" in command:
        if "--no-install-recommends" not in command:
            yield "apt-get install without --no-install-recommends"
        if "rm -rf /var/lib/apt/lists" not in command:
            yield "apt-get: its lists stay in the layer"
    if "pip install" in command and "--no-cache-dir" not in command:
        yield "pip install without --no-cache-dir"
    if re.search(r"(curl|wget)\b.*\|\s*(ba)?sh", command):
        yield "a script from the network is run unseen"


def _copies(lines: list[tuple[str, str]]) -> Iterator[str]:
    for word, rest in lines:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                if not (REPOSITORY / source).exists():
                    yield f"COPY {source}: not in the repository"


def _tags(folder: Path, lines: list[tuple[str, str]]) -> Iterator[str]:
    """raytest, vLLM and Ray: each can change results, so each is in the tag."""
    given = dict(rest.split("=", 1) for word, rest in lines if word == "ARG" and "=" in rest)
    init = (REPOSITORY / "raytest" / "__init__.py").read_text()
    (own,) = re.findall(r'__version__ = "([^"]+)"', init)
    tag = f"raytest:{own}-vllm{given.get('VLLM_VERSION')}-ray{given.get('RAY_VERSION')}"
    text = (folder / "Dockerfile").read_text()
    if tag not in text:
        yield f"the build command names another tag than {tag}"
    named = (folder / "ray-cluster.yaml", *sorted((folder / "kuberay").glob("*.yaml")))
    for path in named:
        for image in re.findall(r"image: (\S+)", path.read_text()):
            if not image.endswith("/" + tag):
                yield f"{path.relative_to(folder)}: image {image}: expected …/{tag}"
    (launcher,) = documents(folder / "ray-cluster.yaml")
    if launcher["max_workers"] != len(launcher["provider"]["worker_ips"]):
        yield "ray-cluster.yaml: max_workers is not the number of worker_ips"
