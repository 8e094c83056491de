"""Plain English, checked: no long sentence, and no word that only this project would use."""

from __future__ import annotations

import re

MAX_WORDS = 25
# A word or phrase that is never right, and what to say instead. The keys are regular expressions.
PRIVATE_WORDS = {
    r"so manieth": "every Nth",
    r"in question": "name the thing: the suspect batches, this file",
    r"the other way (?:about|round)": "the reverse",
    r"bytes of (?:its|their) own": "a full copy",
    r"comes? by": "gets, receives, costs",
    r"(?:what )?became of": "the result of",
    r"what becomes of": "the result of",
    r"whoever": "name the actor: the caller, another process",
    r"no more than since": "at most since",
    r"(?:is|are|does|counts?|lies|lie|be) no more(?= |[.,:;])(?! than)": "no longer",
    r"(?:is|be) (?:un)?told (?:from|apart)": "can be distinguished from",
    r"tell apart": "distinguish",
    r"untold": "not reported",
    r"so manys?\b(?! \w+ (?:that|as))": "give the number",
    r"by so much": "by that amount",
    r"look(?:s)? whether": "checks whether",
    r"in vain": "without success",
    r"stand(?:s)? back": "waits, runs at low priority",
    r"gives? way": "is dropped, is relaxed",
    r"not to be had": "unavailable",
    r"for ever": "forever",
    r"is it is": "is",
    r"the like": "name the things, or end the list",
    r"begun anew": "restarted",
    r"called off": "cancelled, stopped",
    r"(?:beg[aiu]n|begins|beginning|start|starts|started|starting) anew": "from scratch",
    r"mends?|mended|mending": "fix, repair",
    r"bereft": "without",
    r"(?:makes?|made|making) way": "yields",
    r"tells? people": "notifies, reports",
    r"goes? behind": "runs in the background",
    r"thereof|whereof|therein|wherein|hereby|hence|whilst": "of it, in it, therefore, while",
}
_PRIVATE = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), instead) for word, instead in PRIVATE_WORDS.items()]
_CODE = re.compile(r"``[^`]*``|`[^`\n]*`")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|approx|No)\.", re.IGNORECASE)
_LISTED = re.compile(r"\x08\n(?:.+\n?)+")  # click keeps these lines apart
# A sentence ends at a full stop, a question mark, an exclamation mark or a colon before a list, at an empty line, and
# before each row of a table.
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n|\n\s*(?=[-*] |\d\. )|\n(?= +\S[^\n]*\S {2,}\S)|:\s*\n")


def sentences(text: str) -> list[str]:
    """The sentences of a text. A piece of code counts as one word, and an item of a list starts a sentence."""
    text = _LISTED.sub(lambda block: block[0].replace("\n", "\n\n"), text)
    plain = _ABBREVIATION.sub("abbr", _CODE.sub("code", text))
    return [one for one in (" ".join(part.split()) for part in _END.split(plain)) if one]


def long_sentences(text: str, most: int = MAX_WORDS) -> list[str]:
    """The sentences of a text that have more than `most` words."""
    return [one for one in sentences(text) if words(one) > most]


def words(sentence: str) -> int:
    """How many words a sentence has: punctuation and bare numbers count as none."""
    return len([word for word in sentence.split() if re.search(r"[A-Za-z]", word)])


def private_words(text: str) -> list[str]:
    """The private words of a text, each with what to say instead."""
    plain = " ".join(_CODE.sub("code", text).split())
    return [f"{found[0]!r}: say {instead!r}" for word, instead in _PRIVATE for found in [word.search(plain)] if found]


def problems(text: str) -> list[str]:
    """Everything in a text that plain English would not have."""
    return [f"more than {MAX_WORDS} words: {one}" for one in long_sentences(text)] + private_words(text)


# A word of an identifier that only this project would use, and what an engineer would call it.
PRIVATE_NAMES = {
    "bereft": "without_weights",
    "clues": "evidence",
    "crowd": "connections",
    "door": "access",
    "glance": "snapshot",
    "hopeless": "retry_after",
    "mend": "repair",
    "mended": "repaired",
    "owed": "missed",
    "patience": "timeout",
    "rendezvous": "listening socket",
    "roster": "run set",
    "standing": "current verdict",
    "standings": "current verdicts",
    "standpoint": "series head",
    "told": "reported, notified",
    "untold": "unconfirmed",
}
# Public names that others use.
PUBLIC_NAMES = {"test_a_time_is_told"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def private_names(identifier: str) -> list[str]:
    """The private words of an identifier, each with what to call it instead."""
    parts = [] if identifier in PUBLIC_NAMES else [part.lower() for part in _WORD.findall(identifier)]
    return [f"{part!r} in {identifier}: say {PRIVATE_NAMES[part]!r}" for part in parts if part in PRIVATE_NAMES]
