"""Keys and values of prompts' first blocks, kept for the next prompt that begins alike.

A block is found by (tenant, base revision, adapter, all tokens up to its end). An adapter's id names one
saved version that never changes, so that nothing here ever goes stale.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gristmill_worker.base_model import BaseModel
from gristmill_worker.fast.cache import FastCache

Block = list[tuple[Tensor, Tensor]]
"""(KV, n, D) of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose prompts may share blocks."""

    tenant: str
    revision: str
    adapter: str
    """Checkpoint id; empty = the base alone."""


class Prefixes:
    """The newest used blocks, within `bytes_max`. 0 = nothing is kept."""

    def __init__(self, base: BaseModel, bytes_max: int) -> None:
        self.base = base
        self.block = base.block or 0
        self.blocks_max = bytes_max // (self.block * base.position_bytes) if self.block else 0
        self.held: OrderedDict[bytes, Block] = OrderedDict()

    def keys(self, owner: Owner, prompt: Sequence[int]) -> list[bytes]:
        """One for each whole block that has a token behind it: the last token always runs."""
        if not self.blocks_max:
            return []
        digest = hashlib.sha256(repr((owner.tenant, owner.revision, owner.adapter)).encode())
        keys = []
        for end in range(self.block, len(prompt), self.block):
            digest.update(array("q", prompt[end - self.block : end]).tobytes())
            keys.append(digest.digest())
        return keys

    def fill(self, keys: Sequence[bytes], cache: FastCache) -> int:
        """Put the first blocks that are held into an empty cache. Returns how many tokens those are."""
        found = 0
        for key in keys:
            block = self.held.get(key)
            if block is None:
                break
            self.held.move_to_end(key)
            cache.prompt_room(self.block, block[0][0])
            for layer, (k, v) in enumerate(block):
                cache.put_prompt(layer, k.transpose(0, 1), v.transpose(0, 1))
            cache.prefix_length += self.block
            found += self.block
        return found

    def keep(self, keys: Sequence[bytes], cache: FastCache) -> None:
        """Take a copy of the block that the cache has just got, if it is one of the whole ones."""
        at = cache.prefix_length // self.block - 1 if self.block else -1
        if not 0 <= at < len(keys) or cache.prefix_length % self.block or keys[at] in self.held:
            return
        start, end = at * self.block, cache.prefix_length
        self.held[keys[at]] = [
            (k[:, start:end].clone(), v[:, start:end].clone())
            for k, v in map(cache.prefix, range(len(cache.shared)))
        ]
        while len(self.held) > self.blocks_max:
            self.held.popitem(last=False)
