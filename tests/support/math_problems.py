"""Twenty problems of mathematics with right, equivalent and wrong answers.

Columns: problem, reference, right answers, and wrong answers.
"""

PROBLEMS: list[tuple[str, str, list[str], list[str]]] = [
    (r"What is half of one half?", r"\frac{1}{4}", ["0.25", "1/4", r"\frac14", r"\dfrac{2}{8}", ".25", r"25\%"],
     ["0.5", r"\frac{1}{2}", "4", "1:5"]),
    (r"Simplify $\sqrt{48}$.", r"4\sqrt{3}", [r"\sqrt{48}", r"4 \sqrt 3", r"2\sqrt{12}"], [r"3\sqrt{4}", "6.9", "48"]),
    (r"Solve $x^2 = 9$ for all real $x$.", r"-3, 3", ["3, -3", r"\{3,-3\}", r"-3 \text{ and } 3", r"x = \pm 3"],
     ["3", "-3", "3, 3", "3, -3, 0"]),
    (r"Where is $x^2 < 4$?", r"(-2, 2)", [r"(-2,2)", r"\left(-2, 2\right)", r"x \in (-2, 2)"],
     [r"[-2, 2]", r"(-2, 2]", "(2, -2)", "(-2, 3)"]),
    (r"Where is $x \ge 1$ or $x < 0$?", r"(-\infty, 0) \cup [1, \infty)",
     [r"[1, \infty) \cup (-\infty, 0)", r"(-\infty,0)\cup[1,+\infty)"], [r"(-\infty, 0] \cup [1, \infty)", r"[0, 1)"]),
    (r"Expand $(a+1)^2$.", r"a^2 + 2a + 1", ["1 + 2a + a^2", r"(a+1)^2", r"a(a+2)+1"], ["a^2+1", "b^2+2b+1", "a^2+2a"]),
    (r"How long is a side of a square of area 49 square metres?", r"7", [r"7\text{ m}", r"7 \text{ metres}", "7.0"],
     ["49", "-7", "7.1"]),
    (r"How many seconds are in 20000 minutes?", "1200000", ["1,200,000", r"1.2 \times 10^6", r"1{,}200{,}000"],
     ["120000", "1.2"]),
    (r"The point half way between (1, 2) and (3, 6)?", "(2, 4)", [r"\left(2, 4\right)", "(2,4)", r"(2.0, 4.0)"],
     ["(4, 2)", "2, 4.5", "(2, 4, 0)", "6"]),
    (r"Which of east and west is the sun's rising?", r"\text{east}", ["east", r"\textbf{east}", r"\text{ east}"],
     ["west", r"\text{eat}"]),
    (r"A third, as a decimal to 4 places?", "0.3333", ["0.3333", ".3333"], ["0.333", "0.3334", "3333"]),
    (r"What share is 1 of 8 in per cent?", r"12.5\%", [r"12.5\%", "0.125", r"\frac{1}{8}"], ["125", r"8\%"]),
    (r"How large is a right angle?", r"90^\circ", ["90", r"90^{\circ}", r"90 \text{ degrees}"], ["180", "9"]),
    (r"What is the product of the first 5 numbers?", "120", ["5!", "120.", r"2^3 \cdot 15", r"1\cdot2\cdot3\cdot20"],
     ["5", "24", "5!!"]),
    (r"Area of the unit circle?", r"\pi", [r"\pi", r"\frac{2\pi}{2}", r"\pi \cdot 1^2"], ["3.14", r"2\pi", "22/7"]),
    (r"Roots of $z^2 = -1$?", r"i, -i", ["-i, i", r"\{i, -i\}", r"\pm i"], ["i", "1, -1"]),
    (r"The column of 1 over 2?", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{pmatrix}1\\2\end{pmatrix}"],
     [r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"]),
    (r"The line through (0, 1) of slope 2?", "y = 2x + 1", ["y = 1 + 2x", "y=2x+1", r"2x + 1"],
     ["y = 2x - 1", "y = x + 2", "x = 2y + 1"]),
    (r"Three and a half, as a mixed number?", r"3\frac{1}{2}", ["3.5", r"\frac{7}{2}", "7/2"], [r"\frac{3}{2}", "1.5"]),
    (r"Price of two books at \$2.25?", r"\$4.50", ["4.50", "4.5", r"\$4.5"], ["450", "2.25"]),
]  # fmt: skip

MALFORMED = [
    "{",
    "}}{{",
    r"\frac{1}{",
    r"\left(",
    "$$$",
    "\\",
    "^",
    "=",
    "x==",
    r"\text{",
    "?",
    "%",
    "\x00",
    "∞∞",
    "1" * 900,
]
"""Answers without a mathematical meaning."""

HARD = ["9^{9^{9^9}}", "(" * 15 + "x" + "+1)^{2}" * 15, "((((" * 100 + "5" + "))))" * 100, "{" * 480 + "5" + "}" * 480]
"""Answers that cost a verifier without limits minutes, hours or all its memory."""
