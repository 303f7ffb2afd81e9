"""Small copies of prompts' images, for the page of a run; imported where there are images."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from rollouts.images import open_image

LARGEST = 512  # pixels of a side


def image_name(url: str) -> str:
    """The file name of an image: the same image has it in every step."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:20]}.jpg"


def write_thumbnails(urls: Iterable[str], folder: Path) -> None:
    """Write each image, given as a data URI, into `folder` once."""
    for url in urls:
        path = folder / image_name(url)
        if path.exists():
            continue
        image = open_image(url)
        image.thumbnail((LARGEST, LARGEST))
        folder.mkdir(exist_ok=True)
        image.save(path, quality=85)
