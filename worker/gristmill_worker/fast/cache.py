"""Keys and values of a growing batch: a prompt's, shared by all rows, and each row's own behind it."""

import torch
from torch import Tensor

from gristmill_worker.fast.shape import Shape

ROOM_MIN = 64
"""Positions that a row's own part has room for at first; it doubles."""


class FastCache:
    """`prefix` (KV, P, D) of each layer belongs to every row; `own` (B, KV, room, D) is filled up to `used`."""

    def __init__(self, shape: Shape, room: int = 0) -> None:
        self.shape = shape
        self.room = room
        """Positions of the prompt, where they are known before it is run."""
        self.shared: list[tuple[Tensor, Tensor]] = []
        self.prefix_length = 0
        self.own: list[tuple[Tensor, Tensor]] = []
        self.rows = 1
        self.used = 0

    @property
    def length(self) -> int:
        """Positions that the next token comes behind."""
        return self.prefix_length + self.used

    # --- the prompt ------------------------------------------------------------------------------

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """(KV, P, D) each."""
        k, v = self.shared[layer]
        return k[:, : self.prefix_length], v[:, : self.prefix_length]

    def prompt_room(self, count: int, like: Tensor) -> None:
        """Have room for `count` more positions of the prompt. Raises ValueError behind the first token."""
        if self.used:
            raise ValueError("rows have parts of their own; a prompt ends before the first token")
        s, wanted = self.shape, self.prefix_length + count
        if self.shared and self.shared[0][0].shape[1] >= wanted:
            return
        size = (s.kv_heads, max(self.room, wanted), s.head_size)
        before, self.shared = self.shared, []
        for layer in range(s.layers):
            pair = (like.new_empty(size), like.new_empty(size))
            if before:
                for new, old in zip(pair, before[layer], strict=True):
                    new[:, : self.prefix_length] = old[:, : self.prefix_length]
            self.shared.append(pair)

    def put_prompt(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(n, KV, D) of the next positions -> (KV, P + n, D): all so far. `prefix_length` is the caller's."""
        k, v = self.shared[layer]
        end = self.prefix_length + key.shape[0]
        k[:, self.prefix_length : end] = key.transpose(0, 1)
        v[:, self.prefix_length : end] = value.transpose(0, 1)
        return k[:, :end], v[:, :end]

    # --- rows ------------------------------------------------------------------------------------

    def repeat(self, rows: int) -> None:
        """One row becomes `rows` equal ones. Raises ValueError once rows have parts of their own."""
        if self.used:
            raise ValueError("rows differ already; repeat the cache before the first token")
        self.rows = rows
        self.own = []

    def select(self, at: Tensor) -> None:
        """Keep these rows, in this order."""
        self.rows = at.shape[0]
        self.own = [(k[at], v[at]) for k, v in self.own]

    def copy(self) -> "FastCache":
        """Shares the prefix, which never changes."""
        twin = FastCache(self.shape, self.room)
        twin.shared, twin.prefix_length = self.shared, self.prefix_length
        twin.rows, twin.used = self.rows, self.used
        twin.own = [(k.clone(), v.clone()) for k, v in self.own]
        return twin

    def release(self) -> None:
        """Give the memory back."""
        self.shared, self.own = [], []

    def room_for(self, count: int, like: Tensor) -> None:
        """Have room for `count` more positions in every layer."""
        s = self.shape
        if not self.own:
            size = (self.rows, s.kv_heads, max(ROOM_MIN, count), s.head_size)
            self.own = [(like.new_empty(size), like.new_empty(size)) for _ in range(s.layers)]
        room = self.own[0][0].shape[2]
        if self.used + count > room:
            more = max(room, count)
            self.own = [
                (torch.nn.functional.pad(k, (0, 0, 0, more)), torch.nn.functional.pad(v, (0, 0, 0, more)))
                for k, v in self.own
            ]  # fmt: skip

    def put(self, layer: int, key: Tensor, value: Tensor, rows: slice) -> None:
        """(b, KV, D) of these rows' next position."""
        k, v = self.own[layer]
        k[rows, :, self.used] = key
        v[rows, :, self.used] = value

    def attend(self, layer: int, q: Tensor, window: int | None, rows: slice) -> Tensor:
        """q (b, H, D) of these rows' next position, scaled -> (b, H, D). Their own keys are in already."""
        s, count = self.shape, self.used + 1
        keys, values = (part[rows, :, :count] for part in self.own[layer])
        grouped = q.view(-1, s.kv_heads, s.group, s.head_size)
        own = torch.matmul(grouped, keys.transpose(2, 3))
        length, width = self.prefix_length, q.shape[0]
        if not length:
            return torch.matmul(_seen(own, window), values).reshape(q.shape)
        shared_k, shared_v = self.prefix(layer)
        folded = grouped.transpose(0, 1).reshape(s.kv_heads, width * s.group, s.head_size)
        shared = torch.bmm(folded, shared_k.transpose(1, 2))
        shared = shared.view(s.kv_heads, width, s.group, length).transpose(0, 1)
        p = _seen(torch.cat([shared, own], -1), window)
        over = p[..., :length].transpose(0, 1).reshape(s.kv_heads, width * s.group, length)
        out = torch.bmm(over, shared_v).view(s.kv_heads, width, s.group, s.head_size)
        return (out.transpose(0, 1) + torch.matmul(p[..., length:], values)).reshape(q.shape)


def _seen(scores: Tensor, window: int | None) -> Tensor:
    """Probabilities over all positions, the oldest ones outside the window left out."""
    wide = scores.float()
    if window is not None and wide.shape[-1] > window:
        wide[..., : wide.shape[-1] - window] = -torch.inf
    return torch.softmax(wide, -1).to(scores.dtype)
