"""The benchmarks that have names: the place of their data, their prompts, and how an answer is found and judged.

Data and splits are those of the sources that are named beside each. "math" compares by math-verify, as TRL and
lighteval do; where a source compares by rules of its own (Hendrycks' `is_equiv`, Qwen's `math_equal`), some answers may
be judged differently there.
"""

from dataclasses import dataclass
from typing import Literal

from mrl.config.nearest_key import nearest
from mrl.errors import TaskError

BOXED = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Prompt of Qwen2.5-Math's evaluation (`qwen25-math-cot`), with its system message after the problem."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Data, prompt and scoring of one benchmark."""

    dataset: str
    """Id of the data set on the Hugging Face hub."""
    held_out: str
    """Split that is held out."""
    sources: tuple[str, ...]
    """Origins of data, prompt and extraction."""
    subset: str = ""
    train: str = ""
    """Split to train on; empty where there is none."""
    problem: str = "problem"
    """Column of the problem."""
    answer: str = "answer"
    """Column of the right answer."""
    reference: Literal["plain", "hashes", "boxed", "first"] = "plain"
    """Form of the right answer in its column: as it is, after "#### ", in the last box, or first in a list."""
    prompt: str = BOXED
    """Prompt; `{problem}` stands for the problem."""
    extract: Literal["hashes", "boxed", "boxed_or_dollars", "program"] = "boxed"
    """Place of the answer in a completion: after the last "#### " of its last 300 characters; in its last box; in
    its last box or else between its first and last dollar sign; for a program, its last block of code."""
    compare: Literal["text", "math", "program"] = "math"
    """Comparison of answer and reference. Programs are run with the tests in the column `tests`, each in a sealed
    process."""
    tests: str = ""
    entry: str = ""
    """Column with the name of the function to pass to the tests' `check`; empty where the tests run by themselves."""
    examples: str = ""
    """Column with a list of tests; `{test}` in the prompt stands for the first."""


LM_EVAL = "EleutherAI/lm-evaluation-harness: lm_eval/tasks/"
VERL = "volcengine/verl: "
QWEN = "QwenLM/Qwen2.5-Math: evaluation/ (prompt qwen25-math-cot)"
EVALPLUS = "evalplus/evalplus: evalplus/codegen.py, evalplus/provider/utility.py (prompt)"
SCRIPT = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "openai/gsm8k", "test", (f"{VERL}examples/data_preprocess/gsm8k.py", f"{VERL}verl/utils/reward_score/gsm8k.py"),
        subset="main", train="train", problem="question", reference="hashes", extract="hashes", compare="text",
        prompt='{problem} Let\'s think step by step and output the final answer after "####".',
    ),
    "math": Benchmark(
        "DigitalLearningGmbH/MATH-lighteval", "test", (f"{VERL}examples/data_preprocess/math_dataset.py",),
        train="train", answer="solution", reference="boxed",
        prompt="{problem} Let's think step by step and output the final answer within \\boxed{}.",
    ),
    "math500": Benchmark(
        "HuggingFaceH4/MATH-500", "test", (f"{LM_EVAL}hendrycks_math/hendrycks_math500.yaml (data)", QWEN),
    ),
    "aime24": Benchmark(
        "Maxwell-Jia/AIME_2024", "train", (f"{LM_EVAL}aime/aime24.yaml", f"{LM_EVAL}aime/utils.py"),
        problem="Problem", answer="Answer", extract="boxed_or_dollars",
        prompt="Solve the following AIME problem.\n\n{problem}\n\nAnswer:",
    ),
    "aime25": Benchmark(
        "math-ai/aime25", "test", (f"{LM_EVAL}aime/aime25.yaml", f"{LM_EVAL}aime/utils.py"),
        extract="boxed_or_dollars", prompt="Question: {problem}\nAnswer:",
    ),
    "amc23": Benchmark("math-ai/amc23", "test", (QWEN,), problem="question"),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench", "train", (QWEN,), subset="OE_TO_maths_en_COMP",
        problem="question", answer="final_answer", reference="first",
    ),
    "humaneval+": Benchmark(
        "evalplus/humanevalplus", "test", (EVALPLUS, f"{LM_EVAL}humaneval/humaneval_plus.yaml (tests)"),
        problem="prompt", answer="canonical_solution", extract="program", compare="program",
        tests="test", entry="entry_point", prompt=f"{SCRIPT}\n```\n{{problem}}\n```\n",
    ),
    "mbpp+": Benchmark(
        "evalplus/mbppplus", "test", (EVALPLUS, f"{LM_EVAL}mbpp/mbpp_plus.yaml (tests)"),
        problem="prompt", answer="code", extract="program", compare="program",
        tests="test", examples="test_list", prompt=f'{SCRIPT}\n```\n"""\n{{problem}}\n{{test}}\n"""\n```\n',
    ),
    "minerva": Benchmark("math-ai/minervamath", "test", (QWEN,), problem="question"),
}  # fmt: skip
"""Name -> benchmark."""


def benchmark_of(name: str, *, where: str) -> Benchmark:
    """Return the benchmark of this name. Raises TaskError with the known names."""
    if name not in BENCHMARKS:
        near = nearest(name, BENCHMARKS)
        cure = f"did you mean {near}?" if near else ""
        raise TaskError("no such benchmark", where=where, got=name, wanted="one of " + ", ".join(BENCHMARKS), cure=cure)
    return BENCHMARKS[name]
