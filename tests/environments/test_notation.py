r"""The LaTeX that answers are rewritten as; expected by hand."""

from grpo_jax.environments.grading import notation, units

LATEX = {
  # characters
  "－５": "-5",
  "–5": "-5",
  "\u200b7\ufeff": "7",
  "\u200e7\u00a0cm\u200e": "7 cm",
  "7\u2062x": "7x",
  "3½": r"3\frac{1}{2}",
  "²⁄₃": r"\frac{2}{3}",
  "1⁄2": "1/2",
  "2√3": r"2\sqrt{3}",
  "√(x+1)": r"\sqrt{x+1}",
  "∛8": r"\sqrt[3]{8}",
  "x² − x₁": "x^{2} - x_{1}",
  "10⁻³": "10^{-3}",
  "60°": r"60^\circ",
  "60^{°}": r"60^\circ",
  r"\frac{60^{\circ}}{2}": r"\frac{60^\circ }{2}",
  "60\\degree": r"60^\circ",
  "∅": r"\emptyset",
  r"\varnothing": r"\emptyset",
  r"\{ \}": r"\emptyset",
  "ℝ": r"\mathbb{R}",
  "𝟒𝟐": "42",
  # dress
  r"\mathbf{\frac{1}{2}}": r"\frac{1}{2}",
  r"x^\mathbf{12}": "x^{12}",
  r"{\bf 42}": "42",
  r"\textcolor{red}{4}2": "42",
  r"\phantom{-}1": "1",
  r"\left.\frac12\right.": r"\frac{1}{2}",
  r"$\displaystyle 5$": "5",
  r"\(5\)": "5",
  "**42**": "42",
  "x = **42**": "x = 42",
  "2**3": "2^3",
  "x**-1": "x^{-1}",
  r"\approx 42": "42",
  r"42 \checkmark": "42",
  r"\text{Evelyn}": "Evelyn",
  r"15 \mathrm{~km}": r"15 \text{ km}",
  r"2\mathrm{e}^{3}": "2e^{3}",
  r"3 \text{ and } 4": "3 , 4",
  r"72\ ": "72",
  r"72\\": "72",
  # numbers
  "{-}5": "-5",
  "2^{-}": "2^{-}",
  "20٪": r"20\%",
  r"12.5\text{ percent}": r"12.5\%",
  "-$5": r"-\$5",
  "$5$": "5",
  "−15 €": "-€15",
  "1 000 000": "1000000",
  r"1\,234\,567": "1234567",
  r"20,\!000": "20000",
  "1'000": "1000",
  "(1,234)": "(1,234)",
  "1, 234": "1, 234",
  "1.5E-3": r"1.5\times 10^{-3}",
  "6.02 x 10^23": r"6.02\times 10^23",
  "-.5": "-0.5",
  "3 1/4": r"3\frac{1}{4}",
  r"0.1\overline{6}": r"\frac{15}{90}",
  # plain text
  "-5*pi": r"-5*\pi",
  "sqrt(2)/2": r"\sqrt{2}/2",
  "exp(9)": "e^{9}",
  "x^(1/2)": "x^{1/2}",
  "50 percent": r"50 \%",
  "Infinity": r"\infty",
}
VALUES = {  # answer: value and unit.
  r"5\ \text{kg}\cdot\text{m}/\text{s}^2": ("5", {("kg", 1), ("m", 1), ("s", -2)}),
  "864 \\text{ inches}^2": ("864", {("in", 2)}),
  "5 cm2": ("5", {("cm", 2)}),
  "100 mph": ("100", {("mi", 1), ("h", -1)}),
  "€15": ("15", {("euro", 1)}),
  r"-\$5": ("-5", {("dollar", 1)}),
  r"60^\circ, 120^\circ": ("60 , 120", {("degree", 1)}),
  "5 in total": ("5", set()),
  r"10\text{ MW}": ("10", {("megaw", 1)}),
  r"10\text{ mW}": ("10", set()),
  "5 kJ": ("5", {("kj", 1)}),
  "5 in": ("5", {("in", 1)}),
  r"\frac{270}7\text{ degrees}": (r"\frac{270}7", {("degree", 1)}),
  r"\tan 15^\circ": (r"\tan 15^\circ", set()),
  "4 million": ("4 million", set()),
  "3 sin x": ("3 sin x", set()),
  "3 t": ("3 t", set()),
  "2xy": ("2xy", set()),
}


def test_answers_are_rewritten_as_latex_and_only_once():
  wrong = {
    text: notation.latex(text) for text, latex in LATEX.items() if notation.latex(text) != latex
  }
  assert wrong == {}
  again = {text for text in LATEX.values() if notation.latex(text) != text}
  assert again == set()


def test_a_value_is_separated_from_its_unit():
  wrong = {}
  for text, (value, measures) in VALUES.items():
    found, unit = units.split(notation.latex(text))
    if (found, unit.measures) != (value, measures):
      wrong[text] = (found, unit)
  assert wrong == {}


def test_broken_and_long_text_is_returned_too():
  for text in ("{", "}", "\\", r"\text{", r"\color", "^", "√", "**", r"\left", "(" * 100, "}{"):
    notation.latex(text)
    units.split(text)
  long = "½" * (notation.MAX_CHARS + 1)
  assert notation.latex(long) == long
