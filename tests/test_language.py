"""foreign_words: labelled sentences, what must never count, hostile text in linear time."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from language import foreign_words

PROMPT = "Compute the sum of the numbers and explain how you get it."

# Every sentence is an answer to an English prompt. The second list decided between the library and lists of common words.
SENTENCES = """\
en|So we need to add the three numbers together and then check the result.
en|The answer is 24.
en|Let me try again with a different order.
en|First, multiply both sides by 2.
en|But 7 is prime, so this does not work.
en|We get x = 3 and y = 4.
en|Wait, that is not right.
en|Hence f(x) is continuous on [0, 1].
en|Sum of digits: 12
en|Factor the polynomial: (x+1)(x-2)
en|QED
en|gcd lcm mod sqrt log sin cos
en|if n % 2 == 0: return n // 2
en|def solve(a, b): return a * b
en|Marie Curie was born in Warsaw, and she moved to Paris.
en|Simplify to obtain a quadratic.
en|No solution.
en|Try 3 * 4 + 5 - 2
en|substitute u = x + 1, du = dx
en|per person per day
en|Let a, b, c be the sides; then a + b > c.
en|Alice has 3 apples, Bob has 5; total 8.
fr|Donc nous devons ajouter les trois nombres et vérifier le résultat.
fr|La réponse est 24.
fr|Je vais essayer encore une fois avec un autre ordre.
fr|Il faut d'abord multiplier les deux côtés par deux.
de|Also müssen wir die drei Zahlen addieren und dann das Ergebnis prüfen.
de|Die Antwort ist 24.
de|Ich versuche es noch einmal mit einer anderen Reihenfolge.
de|Das ist nicht richtig, weil die Summe zu groß ist.
es|Entonces tenemos que sumar los tres números y comprobar el resultado.
es|La respuesta es 24.
es|Voy a intentarlo otra vez con un orden diferente.
es|Primero hay que multiplicar los dos lados por dos.
pt|Então precisamos somar os três números e verificar o resultado.
pt|A resposta é 24.
pt|Vou tentar de novo com uma ordem diferente, mas não sei se está certo.
it|Quindi dobbiamo sommare i tre numeri e poi controllare il risultato.
it|La risposta è 24.
it|Non è giusto perché la somma è troppo grande.
nl|Dus we moeten de drie getallen optellen en dan het resultaat controleren.
nl|Het antwoord is 24.
nl|Dat is niet goed, want de som is te groot.
pl|Więc musimy dodać te trzy liczby i sprawdzić wynik.
pl|To nie jest dobrze, bo suma jest za duża.
sv|Vi måste lägga ihop de tre talen och sedan kontrollera svaret.
tr|Bu doğru değil, çünkü toplam çok büyük.
id|Jadi kita harus menjumlahkan ketiga angka itu dan kemudian memeriksa hasilnya.
ru|Значит, нам нужно сложить три числа и потом проверить ответ.
uk|Отже, нам потрібно скласти три числа і потім перевірити відповідь."""
MORE = """\
en|Therefore x = 12 and y = 7, giving 12 + 7 = 19.
en|Suppose n is even; write n = 2k.
en|Total cost: 3 * 4.50 = 13.50 dollars.
en|area = pi * r^2
en|Mod 7, 3^6 = 1 by Fermat.
en|Final answer
en|Rearranging yields a cubic in t.
en|Vertices A, B, C, D form a square.
en|Let S denote the set {1, 2, 3}.
en|Contradiction.
en|Case 2: p divides m
en|by induction on n
en|Speed 60 km per hour, distance 180 km.
en|de facto versus per se
en|sum(range(n)) == total
fr|On obtient x = 12 et y = 7, ce qui donne 19.
fr|Le prix total vaut 13,50 euros.
fr|Calculons la somme.
fr|Soit n un entier pair.
de|Wir erhalten x = 12 und y = 7.
de|Der Preis beträgt 13 Euro.
de|Zuerst berechnen wir die Summe.
de|Sei n eine gerade Zahl.
es|Obtenemos x = 12 y luego sumamos los dos valores.
es|Sea n un número par.
es|Calculamos la suma.
pt|Obtemos x = 12 e depois somamos os dois valores.
pt|Seja n um número par.
it|Otteniamo x = 12 e poi sommiamo i due valori.
it|Sia n un numero pari.
nl|We krijgen x = 12 en tellen ze op.
nl|Eerst berekenen we de som.
pl|Otrzymujemy x = 12 i dodajemy obie wartości.
pl|Niech n będzie liczbą parzystą."""


def labelled(text):
    return [line.split("|", 1) for line in text.splitlines()]


@pytest.mark.parametrize("text, missed", [(SENTENCES, 2), (MORE, 5)], ids=["first", "second"])
def test_english_never_counts_and_other_languages_nearly_always_do(text, missed):
    counts = [(language, foreign_words(sentence, PROMPT), sentence) for language, sentence in labelled(text)]
    assert [(n, sentence) for language, n, sentence in counts if language == "en" and n] == []
    words = re.compile(r"[^\W\d_]+")
    others = [(n, len(words.findall(sentence))) for language, n, sentence in counts if language != "en"]
    assert sum(n == 0 for n, _ in others) <= missed
    assert all(n <= most for n, most in others)
    found = [(n, most) for n, most in others if n]
    assert sum(n for n, _ in found) > 0.75 * sum(most for _, most in found)


def test_no_language_is_foreign_to_itself():
    own = {}
    for language, sentence in labelled(SENTENCES + "\n" + MORE):
        own.setdefault(language, []).append(sentence)
    wrong = [(p, s) for sentences in own.values() for p in sentences for s in sentences if foreign_words(s, p)]
    assert wrong == []


@pytest.mark.parametrize(
    "n, text, prompt",
    [
        (0, "The sum is 12.", "1+2="),
        (0, "7+5=12+9=21+3=24", "7+5+9+3="),
        (2, "so привет мир ok", PROMPT),
        (0, "привет", "реши"),
        (5, "We add them. Nous devons ajouter les nombres. Done.", PROMPT),
        (0, "Nous devons ajouter les nombres. Le total est égal à 12.", "Calcule la somme des nombres et explique."),
        (6, "So we have to add them.", "Calcule la somme des nombres et explique."),
        (2, "我们需要", PROMPT),  # four characters
        (0, "我们需要把这些数字加起来。", "请把数字加起来。"),
        (0, "足すとカタ", "足して"),  # Japanese mixes three scripts
        (3, "答案 is forty two", "请回答"),
        (3, "So the answer is 24.", "请用 python 回答这个问题"),  # a name in a prompt makes its script no language of it
        (0, "答案 GPU x Python, sin x + log y, 5 km", "请回答"),
        (0, "Отже, нам потрібно скласти три числа і потім перевірити відповідь.", "Вычислите сумму"),  # too short to tell Russian from Ukrainian
        (0, "Danke schön. Voilà donc.", PROMPT),  # two words are no sentence
        (2, "नमस्ते दुनिया", PROMPT),  # vowel signs split no word
        (2, "안녕하세요 여러분", PROMPT),
        (1, "Отже, потрібно", PROMPT),  # capitalised: may be a name
        (3, "Καλημέρα σας, πώς είναι", PROMPT),  # "σας" has no accent
    ],
)
def test_counts(n, text, prompt):
    assert foreign_words(text, prompt) == n


@pytest.mark.parametrize(
    "text",
    [
        "angle α and Δx, ℝ, µm, 𝑥𝑦, λx, αβ + γδ = ΔΦ, x̂, naïve café",
        "$αβγ привет les nombres sont là$ and \\(la somme des nombres\\) and \\[la somme des nombres\\]",
        "`при вет` ```\nпривет мир\n```\n```python\n# la somme des nombres est ici\n```",
        "    la_somme = 0  # la somme des nombres est ici",
        "def somme(les_nombres, resultat):",
        "for nombre in les_nombres: {",
        "x_1 = les2 + nombres3",
        "Juan de la Cruz and Otto von der Heide went to Rio de Janeiro.",
        "Juan de la Cruz: 5",
        "Jean Dupont, Marie Lefebvre du Bois, Pierre Durand, François Moreau: 5",
        "Москва is a city, and Путь is a word.",
        "see https://fr.wikipedia.org/wiki/la-somme-des-nombres-entiers and www.le.fr/la/somme",
        "lorem ipsum dolor sit amet",
        "e i o a u y",
        "",
    ],
)
def test_mathematics_code_names_and_addresses_never_count(text):
    assert foreign_words(text, PROMPT) == 0


@given(st.text(max_size=200), st.text(max_size=50))
@example("\ud800\udfff\U000e0001\u202e\u0300", "\ud800")
def test_any_text_counts_and_is_bounded(text, prompt):
    assert 0 <= foreign_words(text, prompt) <= len(text) + 2 * text.count("\u0149")


HOSTILE = ["\\(", "$", "```", "`a", "é\u0301", "\ufdfa", "我们", "Àb ", "if (", "\\[ a", "$$a", "\u200b", "https://", "\u0345"]
HOSTILE += ["la réponse est donc ici. ", "les ", "x", "привет ", "if ( ", "\n    a", "\\begin{a}", "Ab de "]


@pytest.mark.parametrize("unit", HOSTILE)
def test_a_megabyte_costs_ten_times_a_tenth(unit):
    def seconds(characters):
        text = unit * (characters // len(unit))
        began = time.process_time()
        foreign_words(text, PROMPT)
        return time.process_time() - began

    seconds(1000)
    assert seconds(1_000_000) < 30 * max(seconds(100_000), 0.02)  # a quadratic one would cost a hundred times
