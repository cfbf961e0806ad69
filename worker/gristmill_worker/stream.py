"""A sample's tokens on their way out, in chunks, with text that never shows part of a stop string."""

from collections.abc import Callable

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import Problem, StreamChunk
from gristmill_contracts.operations import Operation, Sample
from gristmill_worker.base_model import BaseModel
from gristmill_worker.groups import Row
from gristmill_worker.text import Detokenizer, first_stop, held_back


class TokenStream:
    """Collects one row and emits a chunk for every STREAM_FLUSH_TOKENS tokens."""

    def __init__(
        self, base: BaseModel, operation: Operation, emit: Callable[[StreamChunk], bool]
    ) -> None:
        if not isinstance(operation, Sample) or operation.num_samples != 1:
            raise InvalidRequestError("only a sample with num_samples 1 can be streamed")
        self.operation = operation
        self.emit = emit
        self.stops = operation.params.stop or []
        self.decoder = Detokenizer(base.tokenizer, skip_special=True)
        self.row: Row | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sent_tokens = 0
        self.sent_text = 0

    def watch(self, prompt_tokens: int, cached_tokens: int, rows: list[Row]) -> bool:
        """Called by the sampler after each token; False when nobody reads any more."""
        (self.row,) = rows
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.decoder.push(self.row.tokens[-1])
        waiting = len(self.row.tokens) - self.sent_tokens
        if self.row.ended is not None or waiting < limits.STREAM_FLUSH_TOKENS:
            return True
        return self.emit(self._chunk(self.row, final=False))

    def finish(self, error: Problem | None) -> None:
        """The last chunk: what ended the row, or the error."""
        if error is not None or self.row is None:
            self.emit(
                StreamChunk(
                    tokens=[], logprobs=[], text="", prompt_tokens=self.prompt_tokens, error=error
                )
            )
            return
        self.decoder.finish()
        self.emit(self._chunk(self.row, final=True))

    def _chunk(self, row: Row, *, final: bool) -> StreamChunk:
        start, self.sent_tokens = self.sent_tokens, len(row.tokens)
        text, self.sent_text = self._new_text(final=final)
        return StreamChunk(
            tokens=row.tokens[start:],
            logprobs=row.logprobs[start:],
            text=text,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            final=("stop" if row.ended == "stop" else "length") if final else None,
        )

    def _new_text(self, *, final: bool) -> tuple[str, int]:
        text = self.decoder.text
        at = first_stop(text, self.stops)
        end = at if at is not None else len(text)
        if not final and at is None:
            end -= held_back(text, self.stops)
        end = max(end, self.sent_text)
        return text[self.sent_text : end], end
