"""The server's own routes, and completions on the wire to the trainer."""

from collections.abc import Iterable, Iterator

import msgspec

SAMPLE = "/sample"  # completions of a prompt
UPDATE = "/update"  # new weights
HEAD = 4  # bytes before each message: its length


class Sampled(msgspec.Struct, omit_defaults=True):
    """A part of the reply: a completion as soon as it has ended, or an error that ends the reply.

    Arrays are little-endian.
    """

    index: int = 0  # of the completion in its group
    finish_reason: str | None = None
    token_ids: bytes = b""  # int32
    logprobs: bytes = b""  # float32, nats
    # Each version of the weights that sampled, with its first token and the one after its last.
    weight_versions: list[tuple[str, int, int]] = []
    prompt_token_ids: bytes = b""  # int32; as the server has expanded it, where there are images
    prompt_logprobs: bytes = b""  # float32, nats; of all tokens but the first, where asked for
    error: str = ""
    # With `--return-sampling-mask`: of all tokens, one after the other, those that could be drawn.
    mask_ids: bytes = b""  # int32
    mask_sizes: bytes = b""  # int32, one a token


def packed(message: Sampled) -> bytes:
    """A message after its length."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD, "little") + data


def messages(chunks: Iterable[bytes]) -> Iterator[Sampled]:
    """The whole messages in a reply that comes in chunks of any size.

    One that is cut off at the end is left out: the caller knows how many there should be.

    Raises:
        msgspec.MsgspecError: one makes no sense.
    """
    received = bytearray()
    for chunk in chunks:
        received += chunk
        while len(received) >= HEAD:
            end = HEAD + int.from_bytes(received[:HEAD], "little")
            if len(received) < end:
                break
            yield msgspec.msgpack.decode(received[HEAD:end], type=Sampled)
            del received[:end]
