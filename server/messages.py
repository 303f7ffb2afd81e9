"""Messages of trainer and server over HTTP: requests are JSON, completions msgpack."""

import os

import msgspec

from weights.group import Meeting

VLLM_VERSIONS = ("0.32.0", "0.33.0")  # that were tried; requirements.txt has the first
MAX_BODY_BYTES = 64 << 20  # of a request: a prompt with its images
MAX_IMAGES_BYTES = 60 << 20  # of its data URIs, which leaves room for the prompt's ids
NOT_ARRIVED = 409  # the status of an update that has not come through the group


def api_token() -> str:
    """The secret that servers and trainer share; empty where there is none.

    This is `VLLM_API_KEY`, without a line's end.
    """
    return os.environ.get("VLLM_API_KEY", "").strip()


class Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a POST."""


class ConnectRequest(Request):
    """Of `/connect`: takes the server for a trainer, zeroes its weights, and tells about it.

    Without a name of a trainer it only tells.
    """

    trainer: str = ""
    temperature: float = 0.0  # of a server that gives log-probs of a reference
    sampling_params: dict[str, object] = {}  # vLLM's, to be tried


class About(msgspec.Struct):
    """The answer of `/connect`, a line of JSON; the trainer has the server until it hangs up."""

    names: list[str]  # of the model, the path or id first
    max_model_len: int
    dtype: str  # of the model
    lora_rank: int  # of the largest adapter that it takes, in place of weights; 0: it takes weights
    can_sleep: bool  # it was started with `--enable-sleep-mode`
    gpus: list[str | None] = []  # of the workers, once it is a trainer's


class UpdateRequest(Request):
    """Of `/update`: takes new weights, and samples on as their version.

    Without a version it gives up what was coming. The answer, in msgpack, is for how many seconds
    the server did not sample; where the update does not come through, it is an error `NOT_ARRIVED`.
    """

    trainer: str
    weight_version: str = ""
    meeting: Meeting | None = None  # of the group over which they come


class SleepRequest(Request):
    """Of `/sleep`: gives up the GPU's memory until the next update."""

    level: int  # of vLLM: 2 discards the weights, 1 keeps them in the host's memory


class SampleRequest(Request):
    """Of `/sample`: completions of a prompt. Who hangs up aborts them."""

    token_ids: list[int]  # of the prompt
    sampling_params: dict[str, object]  # vLLM's
    images: list[str] = []  # data URIs
    priority: int = 0  # those of a lower number go before all that wait


class Sampled(msgspec.Struct, omit_defaults=True):
    """One of the completions in the answer of `/sample`, a list. Arrays are little-endian."""

    finish_reason: str | None = None
    token_ids: bytes = b""  # int32
    logprobs: bytes = b""  # float32, nats
    # Each version of the weights that sampled, with its first token and the one after its last.
    weight_versions: list[tuple[str, int, int]] = []
    prompt_token_ids: bytes = b""  # int32; as the server has expanded it, where there are images
    prompt_logprobs: bytes = b""  # float32, nats; of all tokens but the first, where asked for
