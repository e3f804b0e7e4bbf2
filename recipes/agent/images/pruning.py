"""Removal of images that no run uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from recipes.agent.boxes.boxes import DEFAULT_FOLDER, BoxHost
from recipes.agent.images.store import ImageStore

_WEEK = 7 * 86_400.0


def collect(older_than: float | None, *, delete: bool) -> Sequence[tuple[str, int]]:
    """Remove images of boxes that no process uses, those that were used in the last week excepted.

    Args:
        older_than: seconds since an image was used last, instead of a week.
        delete: whether they are removed, or only named.

    Returns:
        What each is, and its bytes.
    """
    folder = DEFAULT_FOLDER.expanduser()
    if not (folder / "images").is_dir():
        return ()

    async def run() -> list[tuple[str, int]]:
        boxes = BoxHost(folder, 1)
        try:
            return await ImageStore(boxes).prune(_WEEK if older_than is None else older_than, delete=delete)
        finally:
            await boxes.close()

    return [(f"image {digest} of boxes", size) for digest, size in asyncio.run(run())]
