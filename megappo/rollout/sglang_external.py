"""An SGLang server that runs already, at a URL of `rollout.urls`: asked whether it fits, and never stopped."""

import os
from pathlib import Path

from megappo.errors import EngineError
from megappo.rollout.model_folder import read_architecture, read_vocabulary_size
from megappo.rollout.sglang_client import RequestRefused, SGLangClient


class ExternalServer:
    """Stands in the place of a server of our own."""

    def __init__(self, *, name: str, url: str, key_variable: str | None) -> None:
        """Read the key. Raises EngineError when its environment variable is not set."""
        self.name = f"{name} ({url})"
        self._key_variable = key_variable
        self.url = url
        self.api_key = None if key_variable is None else os.environ.get(key_variable)
        if key_variable is not None and not self.api_key:
            raise EngineError(
                f"{self.name}: start: rollout.api_key_env={key_variable} is not set in the environment of this process "
                "(export it where `megappo` and, on other machines, Ray are started)"
            )

    def exit_code(self) -> int | None:
        """Return None: nothing is known but what the server answers."""
        return None

    async def failure(self, phase: str, reason: str, *, wait_s: float = 0.0) -> EngineError:
        """Return the error that says what failed; the server's log is its owner's."""
        return EngineError(
            f"{self.name}: {phase}: {reason} (a server of rollout.urls, its key that of rollout.api_key_env="
            f"{self._key_variable or 'null'}; its log is where it was started)"
        )

    async def stop(self) -> None:
        """Leave the server alone."""


async def check_external(client: SGLangClient, server: ExternalServer, *, folder: Path, timeout_s: float) -> int:
    """Return the version of a server's weights, if it serves the model of the folder.

    Raises:
        EngineError: it has another architecture or vocabulary, or its version is not a number.
    """
    info = await client.call("start", "GET", "/model_info", None, timeout_s)
    wanted = read_architecture(folder)
    if info["architectures"] != wanted:
        raise await server.failure("start", f"serves {info['architectures']}, and model.path holds {wanted}")
    vocabulary = read_vocabulary_size(folder)
    if not await _knows(client, vocabulary - 1, timeout_s) or await _knows(client, vocabulary, timeout_s):
        raise await server.failure("start", f"its vocabulary is not the {vocabulary} tokens of model.path")
    version = str(info["weight_version"])
    if not version.isdecimal():
        raise await server.failure("start", f"its weight version is {version!r} (start it with --weight-version 0)")
    return int(version)


async def _knows(client: SGLangClient, token: int, timeout_s: float) -> bool:
    """Ask whether a token is in the vocabulary; SGLang checks those of a logit bias, and does not tell its size."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(token): 0.0}}}
    try:
        await client.call("start", "POST", "/generate", body, timeout_s)
    except RequestRefused:
        return False
    return True
