"""One page of ListObjectsV2: keys, and the folders that a delimiter makes of them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gristmill_gateway.s3_store import ObjectInfo


@dataclass(slots=True, kw_only=True)
class Page:
    """`resume`: where the next page begins; None at the end.

    A resume that ends in the delimiter is a common prefix: everything that begins with it is done.
    """

    objects: list[ObjectInfo] = field(default_factory=list)
    common_prefixes: list[str] = field(default_factory=list)
    resume: str | None = None

    @property
    def count(self) -> int:
        return len(self.objects) + len(self.common_prefixes)


def make_page(
    objects: Iterator[ObjectInfo], *, prefix: str, delimiter: str, most: int, done: str = ""
) -> Page:
    """The first `most` keys and common prefixes. done: a common prefix of the page before, or ''."""
    page = Page()
    last = ""
    if most == 0:
        return page
    for info in objects:
        folder = _folder(info.key, prefix, delimiter)
        if folder is not None and folder in (done, last):
            continue
        if page.count == most:
            page.resume = last
            break
        if folder is None:
            page.objects.append(info)
            last = info.key
        else:
            page.common_prefixes.append(folder)
            last = folder
    return page


def _folder(key: str, prefix: str, delimiter: str) -> str | None:
    """The key up to the first delimiter behind the prefix; None if there is none."""
    if not delimiter:
        return None
    at = key.find(delimiter, len(prefix))
    return None if at < 0 else key[: at + len(delimiter)]
