"""Read preferences: a better and a worse answer to a prompt, an answer that is marked as good or bad, or a class.

An object of preferences becomes objects as they are without them: its prompt with one answer, and with the other. So a
prompt may have any layout that `data.records.layouts` has, and what is trained of it is the answer: what follows the
beginning that both share. A ranked list becomes pairs of its best answer and each worse one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, product, zip_longest
from typing import Any, NamedTuple

from data.records.chat import ROLES, Chat, Unanswered
from data.records.fields import EMPTY, graded
from data.records.record import ConverHasApi, Conversation, Instruct, Passage, Pretrain, Record, RefQA, Tokenized
from data.settings import PAIRED, Wanted

Fields = dict[str, Any]

CHOSEN = ("chosen", "chosen_response", "preferred_output")
REJECTED = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
MARKS = ("label", "kto_tag")
SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))  # of a pair
RANKED = ("responses", "completions", "answers", "outputs", "generations")
BY_SCORE, BY_RANK = ("scores", "ratings"), ("ranks", "rank")  # of each of them; rank 1 is the best
OF_ENTRY = {"score": 1, "overall_score": 1, "rating": 1, "rank": -1}  # in an entry; the sign of what is better
IN_ENTRY = ("response", "text", "content")  # where an entry has its answer
DIALOGUES = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query", "input")
ONE_ANSWER = frozenset("answer completion output response target".split())  # where a plain record has it
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # of HH-RLHF, whose dialogues are one text
WHOLE = re.compile(r"-?[0-9]{1,9}(?:\.0+)?")
TRUTHS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "desirable": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0, "undesirable": 0.0}


class Judged(NamedTuple):
    """Hold documents that are judged, the better one of two first: as objects first, then as records."""

    kind: str  # as which it is counted
    documents: tuple[Any, ...]
    value: float = 0.0  # see `data.sample_set.Preference`


WRONG_WAY = "the margin, or score_chosen minus score_rejected, is below 0: the worse answer may stand as chosen"


def split_judged(fields: Fields, wanted: Wanted) -> tuple[list[Judged], list[str]]:
    """Split an object into objects without preferences; also return the fields that grade answers and are not used.

    Raises:
        ValueError: it has no preference of this kind.
    """
    # Pairs are taken apart (`unpaired`) where answers are marked by themselves.
    alone = wanted.kind == "classes" or (_first(MARKS, fields) and not _first(CHOSEN, fields))
    if wanted.kind in PAIRED or (not alone and (_first(REJECTED, fields) or _ranked(fields))):
        judged, used = _ranked(fields) or _pair(fields)
    else:
        judged, used = _marked(fields, wanted)
    unused = [name for name in graded(fields) if name not in used]
    for document in chain.from_iterable(each.documents for each in judged):
        for name in unused:
            document.pop(name, None)
    return judged, unused


def _marked(fields: Fields, wanted: Wanted) -> tuple[list[Judged], set[str]]:
    names = MARKS if wanted.kind == "marked" else MARKS[:1]
    if (name := _first(names, fields)) is None:
        key = "preference" if wanted.kind == "marked" else "labels"
        raise ValueError(f"{' or '.join(names)}: missing; expected one, as the key {key} is for such records")
    value = fields[name]
    rest = {other: each for other, each in fields.items() if other != name}
    if wanted.kind == "marked":
        if (mark := TRUTHS.get(str(value).lower())) is None:
            raise ValueError(f"{name}: expected true or false, found {value!r:.40}")
        if "prompt" not in rest and "response" not in rest and "completion" in rest:  # axolotl's: instruction, question
            rest["response"] = rest.pop("completion")
        return [Judged("marked", (rest,), mark)], {name}
    return [Judged("class", (rest,), _class_of(name, value, wanted.labels))], {name}


def _class_of(name: str, value: Any, labels: tuple[str, ...]) -> int:
    """Return the number of the class that a label means, by its name or its number, also where a table says it.

    Raises:
        ValueError: it means none, or might mean two.
    """
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    number, known = _whole(value), ", ".join(labels[:12])
    if number is not None and (other := _out_of_place(labels)):
        raise ValueError(
            f"{name}: {value!r:.40} may be a name or a number from 0 here, as in the key labels {other}; expected one "
            f"of {known}, as a text, or labels in the order of their numbers from 0"
        )
    if number is None or not 0 <= number < (len(labels) or 2**24):  # which fp32 holds
        known = known or "names in the key labels"
        raise ValueError(f"{name}: expected a number from 0 or one of {known}; found {value!r:.40}")
    return number


@cache
def _out_of_place(labels: tuple[str, ...]) -> str:
    """Describe the first class whose name is the number of another one; empty where there is none."""
    named = ((_whole(label), place) for place, label in enumerate(labels))
    return next((f"{labels[place]!r} is class {place}" for number, place in named if number not in (None, place)), "")


def _whole(value: Any) -> int | None:
    """Return the whole number that a value is, or says as a text; true is 1."""
    text = {"true": "1", "false": "0"}.get(str(value).lower(), str(value))
    return int(text.partition(".")[0]) if WHOLE.fullmatch(text) else None


def _pair(fields: Fields) -> tuple[list[Judged], set[str]]:
    good, bad = _first(CHOSEN, fields), _first(REJECTED, fields)
    if bad is None:
        found = ", ".join(f"{name!r:.60}" for name in list(fields)[:12]) or "(none)"
        missing = f"expected chosen and rejected answers, or columns that name them, found the fields {found}"
        marked = any(name in fields for name in MARKS)
        why = "preference: kto is for answers marked one by one" if marked else "the key preference is for pairs"
        raise ValueError(f"rejected: {missing} ({why})")
    margin, of_margin = _margin(fields)
    used = {*filter(None, (good, bad)), *of_margin}
    rest = {name: value for name, value in fields.items() if name not in used}
    known: tuple[Any, Any] = fields.get(good or ""), fields[bad]
    if all(isinstance(each, dict) and "input_ids" in each for each in known):  # ready-made tokens
        documents = rest | known[0], rest | known[1]
    elif good is not None:
        documents = _with_answer(rest, good, known[0], known), _with_answer(rest, bad, known[1], known)
    else:  # ms-swift: a plain record, and what else might have been answered
        documents = rest, _answered_else(rest, bad, fields[bad])
    return [Judged("pair", documents, margin)], used


def _margin(fields: Fields) -> tuple[float, tuple[str, ...]]:
    """Return by how much an answer is better, where that is said, and the names of the fields that say it."""
    if fields.get("margin") not in EMPTY:
        if (margin := _number(fields["margin"])) is None:
            raise ValueError(f"margin: expected a number, found {fields['margin']!r:.40}")
        return margin, ("margin",)
    for names in SCORES:
        chosen, rejected = (_number(fields.get(name)) for name in names)
        if chosen is not None and rejected is not None:
            return chosen - rejected, names
    return 0.0, ()


def _ranked(fields: Fields) -> tuple[list[Judged], set[str]] | None:
    """Pair the best of several answers with each worse one; None where there is no such list."""
    name = next((name for name in RANKED if isinstance(fields.get(name), list)), None)
    if name is None or _first(REJECTED, fields):
        return None
    answers = fields[name]
    scored, ranked = _first(BY_SCORE, fields), _first(BY_RANK, fields)
    if by := scored or ranked:
        sign, grades = (1 if scored else -1), fields[by]
    else:
        entries = [each if isinstance(each, dict) else {} for each in answers]
        by = next((each for each in OF_ENTRY if all(each in entry for entry in entries)), None)
        if by is None:
            return None
        sign, grades = OF_ENTRY[by], [entry[by] for entry in entries]
        answers = list(map(_answer_in, entries))
    numbers = [_number(grade) for grade in grades] if isinstance(grades, list) else []
    better = [sign * number for number in numbers if number is not None]
    if not len(better) == len(numbers) == len(answers):
        raise ValueError(f"{by}: expected a number for each of {name}")
    best = better.index(max(better, default=0)) if better else 0
    rest = {other: value for other, value in fields.items() if other not in (name, by)}
    pairs = []
    for worse, grade in enumerate(better):
        if grade < better[best]:
            documents = (_with_answer(rest, f"{name}[{place}]", answers[place], ()) for place in (best, worse))
            pairs.append(Judged("pair", tuple(documents), better[best] - grade if sign > 0 else 0.0))
    if not pairs:
        raise ValueError(f"{by}: expected answers of different grades, found all equal")
    return pairs, {name, by}


def _answer_in(entry: Fields) -> Any:
    """Return the answer of an entry that has a grade; None where it has no answer."""
    name = _first(IN_ENTRY, entry)
    return None if name is None else entry[name]


def _with_answer(rest: Fields, name: str, answer: Any, known: Sequence[Any]) -> Fields:
    """Return a prompt's fields with an answer to it, or a whole dialogue.

    Args:
        known: both answers; one of them may stand beside them once more.
    """
    messages = _messages(name, answer)
    if _role(messages[0]) != "assistant":  # the whole dialogue, beside which its beginning may stand once more
        told = [each for each in known if isinstance(each, list)]
        texts = list(chain.from_iterable(each.values() for each in messages))
        for key in (*DIALOGUES, "prompt"):
            there = rest.get(key)
            begins = isinstance(there, list) and any(each[: len(there)] == there for each in told)
            if begins or (isinstance(there, str) and there in texts):
                rest = {other: value for other, value in rest.items() if other != key}
        if also := _first(DIALOGUES, rest):
            raise ValueError(f"{also}: expected the beginning of {name}, or none beside whole dialogues")
        return rest | {"messages": messages}
    if isinstance(rest.get("input"), dict):  # OpenAI's
        rest = {key: value for key, value in rest.items() if key != "input"} | rest["input"]
    if dialogue := _first(DIALOGUES, rest):
        asked = rest[dialogue]
        if not isinstance(asked, list) or not asked or _role(asked[-1]) == "assistant":
            raise ValueError(f"{dialogue}: expected a list of messages up to the one that is answered")
        return rest | {dialogue: [*asked, *messages]}
    if not _first(ASKED, rest):
        if not isinstance(answer, str) or len(turns := _turns(answer)) < 2:
            raise ValueError(f"{name}: expected a prompt beside it, or the whole dialogue as messages")
        return rest | {"messages": turns}
    for other in ONE_ANSWER & rest.keys():
        if rest[other] not in (*EMPTY, *known):
            raise ValueError(f"{other}: expected no third answer beside chosen and rejected")
    words = [each for each in messages if each.keys() <= {"role", "content", "from", "value"}]
    text = words[0].get("content", words[0].get("value")) if len(words) == len(messages) == 1 else None
    plain = {key: value for key, value in rest.items() if key not in ONE_ANSWER}
    return plain | {"response": text if isinstance(text, str) else messages}


def _answered_else(fields: Fields, name: str, answer: Any) -> Fields:
    """Return a plain record with another answer."""
    messages = _messages(name, answer)
    dialogue = _first(DIALOGUES, fields)
    if dialogue and isinstance(fields[dialogue], list):
        whole = _role(messages[0]) != "assistant"
        return fields | {dialogue: messages if whole else [*fields[dialogue][:-1], *messages]}
    if not isinstance(answer, str) or (place := _first(tuple(ONE_ANSWER), fields)) is None:
        raise ValueError(f"{name}: expected a good answer beside it, as chosen")
    return fields | {place: answer}


def _messages(name: str, answer: Any) -> list[dict[str, Any]]:
    made = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    made = [made] if isinstance(made, dict) else made
    if not isinstance(made, list) or not made or not all(isinstance(each, dict) for each in made):
        raise ValueError(f"{name}: expected a text, a message or a list of messages")
    return made


def _turns(text: str) -> list[dict[str, Any]]:
    """Read the turns of a dialogue in one text; none where it is no such text."""
    before, *rest = TURN.split(text)
    said = [] if before.strip() else zip(rest[::2], rest[1::2], strict=True)
    return [{"role": ROLES.get(role.lower(), "user"), "content": words.strip()} for role, words in said]


def _role(message: Any) -> str | None:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(role.lower()) if isinstance(role, str) else None


def _first(names: Sequence[str], fields: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in fields), None)


def _number(value: Any) -> float | None:
    """Return a number, which a table has as text; None where it is none that fp32 holds."""
    with suppress(ValueError, OverflowError):
        if type(value) in (int, float, str) and abs(number := float(value)) < 1e30:
            return number
    return None


def answers_alone(judged: Judged) -> Judged:
    """Return records of which the answers are trained and nothing of their prompts; of a class the whole document.

    Ready-made tokens say by themselves what is trained.

    Raises:
        ValueError: the records have no answers.
    """
    made = judged.documents
    ready = all(isinstance(each, Tokenized) for each in made)
    if judged.kind == "pair" and ready:
        _check_prompts(made)
    if judged.kind == "class" or ready:
        return judged._replace(documents=tuple(map(_passage, made)))
    if not all(
        isinstance(each, (Chat, Instruct)) or (isinstance(each, RefQA) and len(each.rounds) == 2) for each in made
    ):
        raise ValueError("preference: expected a prompt and its answer, or messages")
    chats = [each.messages for each in made if isinstance(each, Chat)]
    if len(chats) == 2:
        common = [one == other for one, other in zip(*chats, strict=False)]
        shared = min([*(place for place, equal in enumerate(common) if not equal), *(len(each) - 1 for each in chats)])
        if any(each[shared].role != "assistant" for each in chats):
            raise ValueError("rejected: expected another answer to the same messages as chosen")
    elif chats:
        shared = max((place for place, each in enumerate(chats[0]) if each.role == "user"), default=0)
    return judged._replace(
        documents=tuple(_untrained(each, shared) if isinstance(each, Chat) else each for each in made)
    )


def _check_prompts(pair: Sequence[Tokenized]) -> None:
    """Refuse two documents that differ before their answers; where nothing is trained, nothing tells these apart."""
    known = (zip(each.input_ids, each.trained, strict=True) for each in pair)
    for place, both in enumerate(zip_longest(*known, fillvalue=(-1, True))):
        if both[0] == both[1]:
            continue
        if all(trained for _, trained in both) or not all(any(each.trained) for each in pair):
            return
        at = f"input_ids[{place}] is another one than in chosen, or trained in one of them alone"
        raise ValueError(f"rejected: {at}; expected another answer to the same prompt")


def unpaired(judged: Sequence[Judged]) -> list[Judged]:
    """Mark the better answer of each pair as desirable and the other as not; one that several pairs have, once."""
    alone = [Judged("marked", (each.documents[place],), 1.0 - place) for each, place in product(judged, (0, 1))]
    return [each for place, each in enumerate(alone) if each not in alone[:place]]


def _untrained(chat: Chat, count: int) -> Chat:
    """Return a chat whose first messages are not trained."""
    before = [each.model_copy(update={"weight": 0}) for each in chat.messages[:count]]
    return chat.model_copy(update={"messages": before + chat.messages[count:]})


def _passage(record: Record) -> Record:
    """Return a record as it is written where a class is asked for."""
    if isinstance(record, Pretrain):
        return Passage(type="pretrain", text=record.text, images=record.images)
    if isinstance(record, Chat) and record.messages[-1].role != "assistant":
        return Unanswered(**dict(record))
    if isinstance(record, (Conversation, ConverHasApi, RefQA)) and record.rounds[-1][0] == "ask":
        raise ValueError("rounds: expected an answer at the end, or the dialogue as messages")
    return record
