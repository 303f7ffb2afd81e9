"""Small copies of prompts' images, for the page of a run; imported where there are images."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rollouts.group import Group
from rollouts.images import open_image

LARGEST = 512  # pixels of a side


def image_name(url: str) -> str:
    """The file name of an image: the same image has it in every step."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:20]}.jpg"


def write_thumbnails(groups: Sequence[Group], folder: Path) -> None:
    """Write each image of the groups' prompts into `folder` once."""
    folder.mkdir(exist_ok=True)
    for group in groups:
        urls = group.prompt.images.urls if group.prompt.images else []
        for url in urls:
            path = folder / image_name(url)
            if path.exists():
                continue
            image = open_image(url)
            image.thumbnail((LARGEST, LARGEST))
            partial = path.with_suffix(".part")
            image.save(partial, "JPEG", quality=85)
            partial.rename(path)
