"""The addresses of a run's servers."""

import re
from pathlib import Path

from config import ADDRESS, TrainConfig
from utils import naming


def server_urls(config: TrainConfig) -> list[str]:
    """The addresses that `vllm_urls` names now, each once.

    `@file` stands for the addresses in a file.

    Raises:
        UserError: a file names none, or there is something else than addresses.
    """
    with naming(f"vllm_urls={','.join(config.vllm_urls)}"):
        urls: list[str] = []
        for word in config.vllm_urls:
            is_file = word.startswith("@")
            urls += Path(word[1:]).expanduser().read_text().split() if is_file else [word]
        urls = [url.rstrip("/") for url in urls]

        wrong = [url for url in urls if not re.match(ADDRESS, url)]
        if wrong or (config.vllm_urls and not urls):
            raise ValueError(f"it needs lines of http://host:port, and has {wrong or 'none'}")
    return list(dict.fromkeys(urls))
