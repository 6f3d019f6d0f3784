"""Words of a response that are not in the language of its prompt, which the reward can charge for (R_lang).

Two looks. By script: a word in a script that the prompt does not use is foreign. By sentence: py3langid (97 languages
by n-grams, here held to LANGUAGES, no download) says what a sentence of the prompt's script is written in. A doubt counts
for the text: formulas, code, names and units are taken out first, a sentence needs three words left and a probability of
SURE, so a foreign half of a sentence, or a remark of two words, is missed.

On the 84 sentences of tests/test_language.py it misses 7 of 47 foreign ones and charges none of the 37 English ones;
lists of common words, tried first, missed 12 and charged one.
"""

import collections
import functools
import re
import unicodedata

from py3langid.langid import MODEL_FILE, LanguageIdentifier

# Fewer than the library knows: among all of them it would take short English for Occitan, short Russian for Bulgarian.
LANGUAGES = "en fr de es pt it nl pl sv da no fi cs hu ro tr id vi ru uk".split()
IN_CYRILLIC = {"ru", "uk"}
SURE = 0.8
MIN_WORDS = 3

# Parts of names where they follow a capitalised word: Juan de la Cruz, Otto von der Heide.
PARTICLES = set("de la las los del della di da das do dos du des le el van von der den ten ter zu al bin ibn".split())
# Lower-case Latin words that are mathematics or units in any language.
SYMBOLS = set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp mod gcd lcm min max lim sup inf det dim"
    " deg rad ker arg sgn sqrt frac cdot cm mm km kg mg ml hz khz mhz ghz kb mb gb tb ms ns th nd rd st vs etc pi".split()
)
UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"}  # about two letters to a word
JAPANESE = {"CJK", "HIRAGANA", "KATAKANA"}
NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$"
    r"|\\\((?:[^\\]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]|\\(?:begin|end)\{\w{1,20}\*?\}|\\[a-zA-Z]+"
    r"|https?://\S+|www\.\S+"
    r"|^(?: {4}|\t)[^\n]*"  # an indented block is code in Markdown
    r"|^[ ]{0,3}(?:def|class|for|while|if|elif|return|import|from|print|var|let|const|int)\b[^\n]*[:;(){}=][ \t]*$",
    re.DOTALL | re.MULTILINE,
)
SENTENCE_END = re.compile(r"[.!?;:\n\u3002\uff01\uff1f\uff1b\uff1a\u061f\u0964]+")
TOKEN = re.compile(r"\w+")
LETTERS = re.compile(r"[^\W\d_]+")


@functools.lru_cache(maxsize=1 << 16)
def script(letter: str) -> str:
    """The writing system of a letter, as the first word of its Unicode name: LATIN, CYRILLIC, CJK, ...; that of a wide or
    mathematical letter is that of the plain one."""
    return re.split("[ -]", unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "UNKNOWN"))[0]


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence of the prose in a text: no code, no formulas, no names, no single letters.

    Every run of letters counts as one word, also in scripts that write no spaces.
    """
    text = NOT_PROSE.sub("\n", text)
    if not text.isascii():  # one form per letter; vowel signs, accents on nothing and invisible characters split no word
        text = unicodedata.normalize("NFC", text)
        text = text.translate({ord(c): None for c in set(text) if unicodedata.category(c) in ("Mn", "Mc", "Me", "Cf")})
    found = []
    for sentence in SENTENCE_END.split(text):
        words, started, in_name = [], False, False
        for token in TOKEN.findall(sentence):
            if token.isalpha():
                parts = [token]
            else:
                parts = [] if token.isascii() else LETTERS.findall(token)  # no x_1, no 3rd; but a date in Chinese
            for word in parts:
                capital = word[0].isupper()
                if started and (capital or (in_name and word in PARTICLES)):
                    in_name = True
                    continue
                in_name = capital
                started = True
                if (len(word) > 1 or not word.isascii()) and word not in SYMBOLS and not word.isupper():
                    words.append(word)
        if words:
            found.append(words)
    return found


@functools.cache
def identifier() -> LanguageIdentifier:
    made = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    made.set_languages(LANGUAGES)
    return made


def language(words: list[str]) -> str | None:
    """The language of a sentence; None where that is not sure."""
    if len(words) < MIN_WORDS:
        return None
    name, probability = identifier().classify(" ".join(words))
    return name if probability > SURE else None


@functools.lru_cache(maxsize=256)
def spoken(prompt: str) -> tuple[frozenset[str], frozenset[str]]:
    """(scripts, languages) of a prompt: every language that one of its sentences may be in, and English where none of its
    sentences in Latin letters is surely in a language."""
    found = sentences(prompt)
    letters = collections.Counter(script(letter) for words in found for word in words for letter in word)
    known = {
        name for words in found for name, probability in identifier().rank(" ".join(words)) if probability > 1 - SURE
    }
    surely = {language(words) for words in found} - {None}
    scripts = set(letters) or {"LATIN"}
    if scripts & {"HIRAGANA", "KATAKANA"}:
        scripts |= JAPANESE
    if letters["LATIN"] < max(letters.values(), default=0) and not surely - IN_CYRILLIC:
        scripts.discard("LATIN")  # names, code and units in a text of another script
    if not surely - IN_CYRILLIC:
        known |= {"en"}
    if not surely & IN_CYRILLIC:
        known |= IN_CYRILLIC
    return frozenset(scripts), frozenset(known)


def foreign_words(text: str, prompt: str) -> int:
    """Words of `text` that are not in a language of `prompt`; what the languages of `prompt` are, its sentences say.

    Of a script that the prompt does not use: every word of two letters or more, two letters a word where the script
    writes no spaces; but no capitalised one (a name) and of Greek only those with an accent (not a product of
    variables). Of a sentence in the prompt's script and another language: every word. Linear in the text.
    """
    scripts, known = spoken(prompt)
    count = 0
    for words in sentences(text):
        own_script = []
        for word in words:
            in_script = collections.Counter(script(letter) for letter in word)
            if scripts.issuperset(in_script):
                own_script.append(word)
                continue
            for name, n in in_script.items():
                if name in scripts or name == "UNKNOWN":
                    continue
                if name in UNSPACED:
                    count += (n + 1) // 2
                elif name == "GREEK":
                    count += any(" WITH " in unicodedata.name(letter, "") for letter in word)
                elif n > 1 and not word[0].isupper():
                    count += 1
        if scripts & {"LATIN", "CYRILLIC"} and language(own_script) not in {None, *known}:
            count += len(own_script)
    return count
