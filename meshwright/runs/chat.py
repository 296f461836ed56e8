"""A conversation with a model: questions in its chat template, answers as they are written, the history kept."""

from collections.abc import Generator, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from meshwright.checkpoint import chat_template_of
from meshwright.data import NOTHING, Shown
from meshwright.data.chat import ChatTemplate, Overran
from meshwright.data.conversations import BadConversation, Message
from meshwright.data.text_stream import TextStream
from meshwright.errors import UserError
from meshwright.model import KVCache, Media
from meshwright.runs.writer import Writer, open_writer, tokenizer_of
from meshwright.train import stream


class Chat:
    """A conversation that is still going on; `messages` is all of it so far."""

    def __init__(
        self,
        writer: Writer,
        template: ChatTemplate,
        system: str | None = None,
        shown: Shown = NOTHING,
        *,
        tokens: int = 512,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> None:
        """`open_chat` opens one from a folder. Answers have at most so many tokens, and what the model has room for.

        What is shown is part of the first question.
        """
        self.messages = [] if system is None else [Message("system", system)]
        self.step = writer.step
        self.written = 0
        """Tokens of the last answer."""
        self.stopped: str | None = None
        """What ended the last answer; None if it was cut off because it was long enough."""
        self._writer, self._template = writer, template
        self._viewer, self._shown = writer.viewer(shown), shown
        self._seen_files = self._viewer.look(shown)
        self._tokens, self._temperature, self._top_p, self._seed = tokens, temperature, top_p, seed
        end = template.end_of_turn()
        turn = writer.tokenizer.first_control(end)
        self._stop = {*writer.generation.stop, *([] if turn is None else [turn])}
        # A template without special tokens ends a turn with text, which tokens may join to what is before it.
        self._end_text = end.strip() if turn is None else ""
        self._cache, self._seen = KVCache(), list[int]()

    def ask(self, question: str) -> str:
        """The answer to a question, which with it becomes part of the conversation."""
        return "".join(self.stream(question))

    def stream(self, question: str) -> Generator[str, None, None]:
        """The answer to a question, part by part; closed early, it is part of the conversation as far as it is."""
        first = not any(message.role == "user" for message in self.messages)
        question = self._viewer.named(question, self._shown if first else NOTHING)
        asked = [*self.messages, Message("user", question)]
        prompt, media = self._prompt(asked)
        answer = list[str]()
        try:
            for part in self._up_to_end(self._parts(prompt, media)):
                answer.append(part)
                yield part
        except BaseException:
            self._cache, self._seen = KVCache(), []  # an interrupt may have left some layers one token behind
            if answer:
                self.messages = [*asked, Message("assistant", "".join(answer))]
            raise
        self.messages = [*asked, Message("assistant", "".join(answer))]

    def _prompt(self, messages: list[Message]) -> tuple[list[int], Media | None]:
        try:
            text = self._template.prompt(messages)
        except BadConversation as error:
            system = " or leave out --system" if messages[0].role == "system" else ""
            raise UserError(f"the conversation {error}; write it differently{system}") from error
        except Overran as error:
            raise UserError(f"the conversation {error}") from error
        encode = self._writer.tokenizer.encode_rendered
        prompt, media = self._viewer.encode(self._writer.tokenizer, text, self._seen_files, encode, encode)
        if self._room(prompt) < 1:
            limit = self._writer.model.shape.max_sequence_length
            raise UserError(
                f"the conversation has {len(prompt)} tokens and model.max_sequence_length = {limit}, so there is no "
                "room for an answer; start a new one"
            )
        return prompt, media

    def _room(self, prompt: list[int]) -> int:
        return min(self._tokens, self._writer.model.shape.max_sequence_length - len(prompt))

    def _parts(self, prompt: list[int], media: Media | None) -> Iterator[str]:
        """The answer's text as its tokens complete it, up to a stop token."""
        tokenizer, text = self._writer.tokenizer, TextStream(self._writer.tokenizer, names=False)
        self.written, self.stopped = 0, None
        # What earlier turns have in common with this one is not computed again; one token is, for its logits.
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._seen, prompt[:-1], strict=False)))
        self._cache.crop(shared)
        self._seen = prompt[:shared]
        written = list[int]()
        for token in stream(
            self._writer.model,
            prompt,
            self._room(prompt),
            temperature=self._temperature,
            top_p=self._top_p,
            seed=self._seed + len(self.messages),
            stop=self._stop,
            vocab_size=tokenizer.vocab_size,
            repetition_penalty=self._writer.generation.repetition_penalty,
            cache=self._cache,
            media=media,
        ):
            self._seen = (prompt + written)[: self._cache.length]
            if token in self._stop:
                self.stopped = tokenizer.decode([token])
                break
            written.append(token)
            self.written += 1
            yield text.add(token)
        yield text.end()

    def _up_to_end(self, parts: Iterable[str]) -> Iterator[str]:
        """A text up to where what ends a turn begins; what may be the beginning of that waits for what follows."""
        end, held = self._end_text, ""
        for part in parts:
            held += part
            if end and end in held:
                self.stopped = end
                held = held[: held.index(end)]
                break
            waits = next((n for n in range(len(end) - 1, 0, -1) if held.endswith(end[:n])), 0)
            if len(held) > waits:
                yield held[: len(held) - waits]
                held = held[len(held) - waits :]
        if held:
            yield held


def open_chat(
    source: Path,
    device: str,
    system: str | None = None,
    shown: Shown = NOTHING,
    *,
    tokens: int = 512,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Chat:
    """A conversation with a run's newest weights or a Hugging Face folder's; one without a chat template is refused.

    What is shown is part of the first question.
    """
    template = chat_template_of(source, tokenizer_of(source))
    if not template.is_there:
        raise UserError(
            f"{source} has no chat template, since it was not trained on conversations or came without one; continue a "
            f"text with: meshwright generate {source} --prompt TEXT"
        )
    writer = open_writer(source, device)
    return Chat(writer, template, system, shown, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
