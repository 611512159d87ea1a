"""Token ids to text while they arrive, never half a character."""

import codecs

from .tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence. Every `push` costs the length of one token.

    The deltas together are the text of all tokens, without a character that is not complete at
    the end. A U+FFFD appears only where the bytes can never become a character, or where a token
    really spells one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, at_start: bool = False, skip_special: bool = True
    ) -> None:
        """at_start: nothing stands before the first token, so the space that SentencePiece puts
        in front of a text is taken off. skip_special: special tokens have no text.
        """
        self._tokenizer = tokenizer
        self._at_start = at_start
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer.id_to_bytes(token_id)
        if self._at_start and piece:  # an id without a token leaves the start where it is
            piece = self._tokenizer.strip_start(piece)
            self._at_start = False
        return self._decoder.decode(piece)
