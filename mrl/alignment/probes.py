"""Texts on which a tokenizer proves that its byte table is right and that a faster encoder gives the same ids."""

PROBES = (
    "The quick brown fox",
    " leading and  double   spaces ",
    "12345 + 678 = 13023.0",
    "line one\nline two\r\n\tindented\n\n",
    "def f(x):\n    return {'a': [x**2, -1]}",
    "na\u00efve caf\u00e9 \u00df \u0130 \u00bd \ufb01",
    "\u6f22\u5b57 \u304b\u306a \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f469\u200d\U0001f52c \U0001d4b3 \u00a0\u200b\ufeff",
    "\u0120 <0x0A> <|im_end|> </s> <unk>",
)
"""In NFC, without the metaspace character."""

CUTTING_PROBES = (
    "I'll say it's \"DON'T\", they'Ve we'd he'S",
    "a1b22c333d4444 55555.666,777 \u0661\u0662\u0663 \u00b2\u2075 \u2167",
    "CamelCaseHTTPServer snake_case kebab-case ALLCAPS mIxEd iPhone",
    "x\n\n\ny  \n  z\t\t\tw \r\n\r\n  \u3000\u2003end   ",
    "!!! ... ?!?! //**/ #include <a.h> $$$ \u20ac100 <<<>>> ||| \u2014\u2026\u201c\u201d",
    "https://example.org/a?b=c&d=%20e#f user@example.com C:\\dir\\file.txt",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u041c\u0418\u0420 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\x00\x01\x1f\x7f\x85\u2028\u2029\u180e\u00ad",
    "",
    " ",
    "\n",
)
"""Where regular expressions cut: contractions, digits, case, spaces, line ends, controls."""
